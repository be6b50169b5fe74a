"""vLLM as an engine: a server that the actor starts, or running servers.

It is started with vLLM's processed log-probabilities, which refer to the distribution that is
sampled from: after temperature, top-p, top-k and constraint. At temperature 0 they refer to the
untempered distribution.
"""

import uuid
from typing import Any

from coppice.actors.engines.served import ServedEngine
from coppice.actors.engines.vllm_api import VLLMHttp
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest

_CONSTRAINTS = {"regex": "regex", "json_schema": "json"}
"""vLLM's names of the kinds."""


class VLLMEngine(ServedEngine):
    """Implements ``actors.engines.base.Engine``, but for the tokens that top-p and top-k left, the
    most probable tokens, and pictures."""

    kind = VLLMHttp

    def _prefix(self, request: GenerateRequest) -> dict[str, Any]:
        # vLLM samples at least one token
        return self._body(request, {"max_tokens": 1, "temperature": 0.0})

    def _bodies(self, request: GenerateRequest) -> list[dict[str, Any]]:
        """Return the body of POST /inference/v1/generate, of all samples."""
        sampling, lacks = request.sampling, ""
        if sampling.top_logprobs:
            lacks = f"top_logprobs {sampling.top_logprobs}: expected 0"
        elif sampling.support and sampling.cuts:
            lacks = f"the tokens that top_p {sampling.top_p} and top_k {sampling.top_k} leave:"
            lacks += " expected top_p 1 and top_k 0"
        elif sampling.experts_from >= 0:
            lacks = "routed experts: expected learner.routing_replay false"
        elif (request.tokens < 0).any():
            lacks = "pictures: expected text"
        if lacks:
            raise DataFault(f'{lacks} with actors.engine = "vllm"; "local" and "sglang" serve them')
        settings: dict[str, Any] = {
            "n": request.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        settings |= {"stop": sampling.stop} if sampling.stop else {}
        # vLLM adds the number of the sample
        settings |= {} if sampling.seed is None else {"seed": sampling.seed * 1000003 % 2**31}
        if (form := sampling.constraint) is not None:
            settings["structured_outputs"] = {_CONSTRAINTS[form.kind]: form.text}
        return [self._body(request, settings)]

    def _body(self, request: GenerateRequest, settings: dict[str, Any]) -> dict[str, Any]:
        name, ids = f"coppice-{uuid.uuid4().hex}", request.tokens.tolist()
        return {"request_id": name, "token_ids": ids, "sampling_params": settings | {"logprobs": 0}}
