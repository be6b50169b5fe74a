"""Supervised fine-tuning of a causal language model: full or LoRA, the loss on completion tokens alone.

Packing reads a batch as one forest (learner/trees.py): equal prefixes, such as the instruction all rows share, are computed once, and no
row attends to another. The loss is the mean over the batch's completion tokens however the batch is cut into forwards.
"""

import functools
import math
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from learner.attention import FOREST, NAME, Layout
from learner.head import token_logprobs
from learner.model import check_head
from learner.trees import Path as TokenPath
from learner.trees import cuts, micro_batches, pack
from wire.atomic import drafted
from wire.hardware import compute_dtype

_LINES = 10
"""Progress lines of a training, about."""


class Example(msgspec.Struct, frozen=True):
    """Token ids; the loss covers those from ``start`` on. group: what its row is held out together with, "" for itself alone."""

    tokens: list[int]
    start: int
    group: str = ""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to train. batch: examples a step. warmup, cooldown: steps over which the rate rises at first, falls to 0 at last.

    schedule: what the rate does after the warm-up: nothing, or a fall to 0 over the remaining steps. shuffle: the seed of a fresh order each
    epoch; None takes the examples as they come. lora_rank 0: all weights train. forward_tokens: tokens of one forward, 0 for the batch.
    dtype: the number type of the products; "auto" is what this machine computes in best.
    """

    steps: int
    batch: int
    lr: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    cooldown: int = 0
    shuffle: int | None = None
    lora_rank: int = 0
    lora_alpha: float = 32.0
    packing: bool = False
    forward_tokens: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class Losses(msgspec.Struct, frozen=True):
    """What a training ended with. held_out: mean over held-out completion tokens before and after, None without held-out examples."""

    last: float
    held_out: tuple[float, float] | None
    seconds: float


def rate(recipe: Recipe, step: int) -> float:
    """The learning rate of step 0, 1, ..: the first is above 0, and so is the last."""
    r = recipe
    rising = r.lr * min(1.0, (step + 1) / max(1, r.warmup), (r.steps - step) / max(1, r.cooldown))
    if r.schedule == "constant" or step < r.warmup:
        return rising
    done = (step - r.warmup) / max(1, r.steps - r.warmup)
    return rising * (1 - done if r.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def batch_of(examples: Sequence[Example], recipe: Recipe, step: int) -> list[Example]:
    """The examples of a step; the epochs follow each other without a gap."""
    made = []
    for place in range(step * recipe.batch, (step + 1) * recipe.batch):
        epoch, index = divmod(place, len(examples))
        if recipe.shuffle is not None:
            index = _order(len(examples), recipe.shuffle, epoch)[index]
        made.append(examples[index])
    return made


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def within(examples: Sequence[Example], most: int) -> tuple[list[Example], int]:
    """The examples of at most ``most`` tokens, and how many are longer."""
    kept = [example for example in examples if len(example.tokens) <= most]
    return kept, len(examples) - len(kept)


def context_of(model: Path) -> int:
    """The tokens a model takes; 2^31 when its config does not say."""
    text = AutoConfig.from_pretrained(model).get_text_config()
    return getattr(text, "max_position_embeddings", None) or 2**31


def fine_tune(
    model: Path, examples: Sequence[Example], out: Path, recipe: Recipe, threads: int, held_out: Sequence[Example] = ()
) -> Losses:
    """``train`` into a folder ``out`` that appears whole or not at all, in the place of what is there."""
    with drafted(out) as draft:
        losses = train(model, examples, draft, recipe, threads, held_out)
        shutil.rmtree(out, ignore_errors=True)
    return losses


def train(
    model: Path,
    examples: Sequence[Example],
    folder: Path,
    recipe: Recipe,
    threads: int,
    held_out: Sequence[Example] = (),
) -> Losses:
    """Train ``model`` for ``recipe.steps`` batches; the result is a Hugging Face model in ``folder``, adapters merged.

    Raises ValueError for a model whose head is not the plain one, torch.OutOfMemoryError.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.shuffle or 0)
    student = Student(model, recipe)
    optimizer = torch.optim.AdamW(student.trained(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    before = student.measure(held_out) if held_out else None
    if before is not None:
        print(f"  held-out loss {before:.4f} over {len(held_out)} rows", flush=True)
    start, seen, loss = time.monotonic(), 0, math.nan
    for step in range(recipe.steps):
        batch = batch_of(examples, recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step)
        loss = student.learn(batch)
        torch.nn.utils.clip_grad_norm_(student.trained(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += sum(len(e.tokens) for e in batch)
        spent = time.monotonic() - start
        if (step + 1) % -(-recipe.steps // _LINES) == 0 or step + 1 == recipe.steps:
            print(f"  step {step + 1} of {recipe.steps}: loss {loss:.3f}, {seen} tokens, {spent:.0f} s", flush=True)
    spent = time.monotonic() - start
    after = student.measure(held_out) if before is not None else None
    if after is not None:
        print(f"  held-out loss {after:.4f}, before {before:.4f}", flush=True)
    student.save(folder)
    return Losses(loss, None if before is None or after is None else (before, after), spent)


class Student:
    """The model in training: float32 weights, compute in the recipe's type, adapters if the recipe has them."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.folder, self.recipe = folder, recipe
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.compute = getattr(torch, compute_dtype(recipe.dtype))
        attention = {"attn_implementation": NAME} if recipe.packing else {}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention)
        check_head(str(folder), model)
        if recipe.lora_rank:
            adapters = LoraConfig(r=recipe.lora_rank, lora_alpha=recipe.lora_alpha, target_modules="all-linear", lora_dropout=0.0)  # pyright: ignore[reportArgumentType]  # fmt: skip
            model = get_peft_model(model, adapters)
        self.model: Any = model.to(self.device).train()

    @property
    def causal(self) -> Any:
        """The causal LM under the adapters, if any."""
        return self.model.get_base_model() if self.recipe.lora_rank else self.model

    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that train."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def learn(self, batch: Sequence[Example]) -> float:
        """Add the gradient of the batch's loss, and return that loss."""
        loss, targets = 0.0, _targets(batch)
        for part in parts(batch, self.recipe):
            share = _targets(part) / targets
            made = self.loss(part)
            (made * share).backward()
            loss += made.item() * share
        return loss

    @torch.no_grad()
    def measure(self, examples: Sequence[Example]) -> float:
        """The mean loss over the completion tokens of some examples."""
        self.model.eval()
        size = self.recipe.batch
        batches = [examples[i : i + size] for i in range(0, len(examples), size)]
        shares = [part for batch in batches for part in parts(batch, self.recipe)]
        loss = math.fsum(self.loss(part).item() * _targets(part) for part in shares) / _targets(examples)
        self.model.train()
        return loss

    def loss(self, batch: Sequence[Example]) -> torch.Tensor:
        """Mean negative log-probability of the completion tokens of one forward."""
        read = self._packed if self.recipe.packing else self._padded
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.compute == torch.bfloat16):
            hidden, targets = read(batch)
            weight = self.causal.get_output_embeddings().weight
            return -token_logprobs(hidden, weight, targets)[0].mean()

    def _padded(self, batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(e.tokens) for e in batch)
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, example in enumerate(batch):
            ids[row, : len(example.tokens)] = example.tokens
            mask[row, : len(example.tokens)] = 1
        hidden = self.causal.get_decoder()(
            input_ids=torch.tensor(ids, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            use_cache=False,
        ).last_hidden_state
        read = torch.cat([hidden[i, e.start - 1 : len(e.tokens) - 1] for i, e in enumerate(batch)])
        return read, torch.tensor([t for e in batch for t in e.tokens[e.start :]], device=self.device)

    def _packed(self, batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
        forest = pack([TokenPath(e.tokens, e.start) for e in batch])
        layout = Layout(forest, "auto", self.device)
        hidden = self.causal.get_decoder()(
            input_ids=torch.as_tensor(layout.forest.tokens, device=self.device)[None],
            position_ids=torch.as_tensor(layout.forest.depth, device=self.device)[None],
            attention_mask=FOREST.to(self.device),
            layout=layout,
            use_cache=False,
        ).last_hidden_state
        read = torch.as_tensor(forest.read, device=self.device)
        return hidden[0][read], torch.as_tensor(forest.target, device=self.device)

    def save(self, folder: Path) -> None:
        """Weights in bfloat16, adapters merged, and the tokenizer. Raises OSError for a disk that does not take them."""
        whole = self.model.merge_and_unload() if self.recipe.lora_rank else self.model
        try:
            whole.to(torch.bfloat16).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.folder).save_pretrained(folder)
        except (OSError, SafetensorError) as error:
            raise OSError(f"the trained model could not be written to {folder}: {error}") from None


def parts(batch: Sequence[Example], recipe: Recipe) -> list[list[Example]]:
    """A batch cut into forwards of at most ``recipe.forward_tokens`` (a longer example stands alone), neighbours alike."""
    if not recipe.forward_tokens:
        return [list(batch)]
    if recipe.packing:
        groups, _ = micro_batches(cuts([TokenPath(e.tokens, e.start) for e in batch]), recipe.forward_tokens)
        return [[batch[i] for i in group] for group in groups]
    made: list[list[Example]] = []
    for example in sorted(batch, key=lambda e: len(e.tokens)):
        if not made or (len(made[-1]) + 1) * len(example.tokens) > recipe.forward_tokens:
            made.append([])
        made[-1].append(example)
    return made


def _targets(examples: Sequence[Example]) -> int:
    return sum(len(e.tokens) - e.start for e in examples)
