"""SGLang as an engine: a server that the actor starts, or running servers.

SGLang's log-probabilities refer to the distribution after temperature. If top-p or top-k cut the
distribution, its sampling mask gives the log-probabilities of the rest; a constraint is applied
before both. At temperature 0 they refer to the untempered distribution.
"""

import uuid
from typing import Any

import numpy as np

from coppice.actors.engines.served import ServedEngine
from coppice.actors.engines.sglang_api import SGLangHttp
from coppice.common import vision
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest


class SGLangEngine(ServedEngine):
    """Implements ``actors.engines.base.Engine``."""

    kind = SGLangHttp

    def _prefix(self, request: GenerateRequest) -> dict[str, Any]:
        nothing = {"max_new_tokens": 0, "temperature": 0.0}
        name = f"coppice-{uuid.uuid4().hex}-prefix"
        return self._prompt(request) | {"sampling_params": nothing, "rid": name}

    def _prompt(self, request: GenerateRequest) -> dict[str, Any]:
        """Return ids with one placeholder per picture, which SGLang repeats, and pictures."""
        tokens = request.tokens
        if self.vision is None or not (tokens < 0).any():
            return {"input_ids": tokens.tolist()}
        self.vision.sequence(tokens, request.images)
        shown = vision.runs(tokens)
        kept = tokens >= 0
        kept[[run.start for run in shown]] = True
        ids = np.where(tokens < 0, self.vision.token, tokens)[kept]
        return {
            "input_ids": ids.tolist(),
            "image_data": [vision.url(request.images[run.number]) for run in shown],
        }

    def _bodies(self, request: GenerateRequest) -> list[dict[str, Any]]:
        """Return the bodies of POST /generate, one per sample."""
        sampling, prompt = request.sampling, self._prompt(request)
        if sampling.top_logprobs:
            raise DataFault(
                f"top_logprobs {sampling.top_logprobs}: expected 0 with SGLang; ask the embedded"
                ' engine (actors.engine = "local", coppice serve --model)'
            )
        if sampling.constraint and self.turns:
            raise DataFault(
                "a constraint with actors.sglang.colocated: SGLang ends if memory is released while"
                " it compiles one; send none, or give actors GPUs of their own"
            )
        if sampling.cuts and self.way.elastic:
            raise DataFault(
                "scheduler.top_p and top_k behind a router, which drops the request for the tokens"
                " they left: set top_p = 1 and top_k = 0"
            )
        settings: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
        }
        settings |= {"stop": sampling.stop} if sampling.stop else {}
        if sampling.constraint is not None:
            settings[sampling.constraint.kind] = sampling.constraint.text
        prompt |= {"return_logprob": True, "logprob_start_len": -1}
        prompt |= {"return_prompt_token_ids": True} if "image_data" in prompt else {}
        if sampling.experts_from >= 0:
            prompt |= {"return_routed_experts": True}
            prompt |= {"routed_experts_start_len": sampling.experts_from}
        if sampling.cuts:
            vocabulary, limit = self.weights.facts.vocabulary, self.weights.facts.mask
            prompt["return_sampling_mask"] = True
            # SGLang reports the mask only with a top-k; that of the vocabulary cuts nothing
            settings["top_k"] = sampling.top_k or vocabulary or limit + 1
            if settings["top_k"] > limit:
                raise DataFault(
                    f"top_k {sampling.top_k}: expected a top_k of at most {limit}, or actors."
                    f"sglang.arguments.sampling_mask_max_tokens = {vocabulary}"
                )
        bodies: list[dict[str, Any]] = []
        for i in range(request.n):
            # SGLang uses seeds only if it was started with enable_deterministic_inference
            seed = sampling.seed
            own = {} if seed is None else {"sampling_seed": (seed * 1000003 + i) % 2**31}
            name = f"coppice-{uuid.uuid4().hex}"
            bodies.append(prompt | {"rid": name, "sampling_params": settings | own})
        return bodies
