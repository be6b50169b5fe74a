"""A Bradley-Terry reward model as PPR's judge: a turn's score is the sigmoid of one logit
(methods.md 2.3, the Skywork baseline).

The user says the question and the earlier turns, the assistant the turn and its search's result. No
code in the model's folder is run, and weights are read only from safetensors.
"""

import asyncio
import math
from typing import Annotated, Any

from msgspec import Meta

from coppice.common.hardware import torch_device
from coppice.judges.base import Judge
from coppice.judges.pprm import query_and_response
from coppice.wire.messages import JudgedTurn, Judgement


class RewardModel(Judge):
    """Column process in (0, 1). model: a folder or a hub id of a sequence classifier with one
    logit. max_length: most tokens of a conversation, of which the end is kept."""

    name = "reward_model"
    columns = ("process",)
    limits = (0.0, 1.0)
    concurrency = 1
    batch = 8

    def __init__(self, model: str, max_length: Annotated[int, Meta(ge=2)] = 4096):
        self.folder, self.max_length = model, max_length
        self._model: Any = None
        self._tokenizer: Any = None

    async def start(self) -> None:
        """Load the model. Raises ValueError when the model does not exist or gives several logits,
        and OSError when it has no safetensors."""
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0]
            wish = "expected a folder with a sequence classifier, or its hub name, owner/name"
            raise self._wrong(f"cannot be loaded: {wish} ({cause})") from None
        if (logits := config.num_labels) != 1:
            raise self._wrong(f"gives {logits} logits, expected 1: is it a reward model?")
        longest = getattr(config, "max_position_embeddings", self.max_length)
        if (most := self.max_length) > longest:
            raise self._wrong(f"reads {longest} tokens at most: lower max_length = {most}")
        self.device = torch_device()
        kind = torch.bfloat16 if self.device == "cuda" else torch.float32
        safe = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        load = AutoModelForSequenceClassification.from_pretrained
        model, loading = load(self.folder, dtype=kind, **safe)
        if missing := sorted(loading["missing_keys"]):
            fault = f"lacks the weights {missing}, which would be random"
            raise self._wrong(f"{fault}: is it a reward model?")
        self._model = model.to(self.device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"judge reward_model: model {self.folder!r} {why}")

    async def close(self) -> None:
        self._model = self._tokenizer = None

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        rows = [self.tokens(turn) for turn in turns]
        logits = await asyncio.to_thread(self._logits, [self.end(row) for row in rows])
        return [Judgement({"process": sigmoid(x)}, explanation=f"logit {x:.4f}") for x in logits]

    def tokens(self, turn: JudgedTurn) -> list[int]:
        """Return the token ids of a turn's conversation."""
        query, response = query_and_response(turn)
        if not self._tokenizer.chat_template:
            return self._tokenizer(f"{query}\n\n{response}")["input_ids"]
        chat = [{"role": "user", "content": query}, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def end(self, ids: list[int]) -> list[int]:
        """Return the last ``max_length`` ids. The opening token of the text, if there is one,
        replaces the first of them."""
        if len(ids) <= self.max_length:
            return ids
        openings = (self._tokenizer.bos_token_id, self._tokenizer.cls_token_id)
        opening = ids[:1] if ids[0] in openings else []
        return opening + ids[len(opening) - self.max_length :]

    def _logits(self, rows: list[list[int]]) -> list[float]:
        """Return one logit per row. The model needs a padding token to find a row's last token;
        without one, each row is read alone."""
        padding = self._model.config.pad_token_id
        if padding is None and len(rows) > 1:
            return [logit for row in rows for logit in self._logits([row])]
        import torch

        longest = max(map(len, rows))
        ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            output = self._model(ids.to(self.device), attention_mask=mask.to(self.device))
        return output.logits[:, 0].float().tolist()


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)) without overflow for logits far from 0."""
    return 0.5 * (1.0 + math.tanh(0.5 * logit))
