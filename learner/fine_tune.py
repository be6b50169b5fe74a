"""Supervised fine-tuning of a causal language model, full or with LoRA. Only completion tokens
enter the loss.

Packing reads a batch as one forest (learner/forest/trees.py). Equal prefixes, such as a common
instruction, are computed once, and no row attends to another row. The loss is the mean over the
batch's completion tokens, no matter how the batch is cut into forwards.
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

from coppice.common.atomic import drafted
from coppice.common.hardware import compute_dtype
from coppice.learner.forest.attention import FOREST, NAME, Layout
from coppice.learner.forest.head import token_logprobs
from coppice.learner.forest.trees import Path as TokenPath
from coppice.learner.forest.trees import cuts, micro_batches, pack
from coppice.learner.model.model import check_head

_LINES = 10
"""The approximate number of progress lines per training."""


class Example(msgspec.Struct, frozen=True):
    """Token ids, of which those from ``start`` on enter the loss. group: rows of one group are held
    out together; "" for a row of its own."""

    tokens: list[int]
    start: int
    group: str = ""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to train. batch: examples per step. warmup: first steps, in which the rate rises.
    cooldown: last steps, in which it falls towards 0.

    schedule: after the warm-up, the rate stays constant or falls to 0 over the remaining steps.
    shuffle: the seed of a new order in each epoch; None keeps the order of the examples. lora_rank:
    with 0, all weights train. forward_tokens: the most tokens of one forward; 0 forwards a batch at
    once. dtype: the number type of the products; "auto" chooses the best one for this machine.
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
    """The losses of a training. held_out: mean over held-out completion tokens before and after, or
    None without held-out examples."""

    last: float
    held_out: tuple[float, float] | None
    seconds: float


def rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step (0, 1, ..). The first and the last rate are above 0."""
    r = recipe
    rising = r.lr * min(1.0, (step + 1) / max(1, r.warmup), (r.steps - step) / max(1, r.cooldown))
    if r.schedule == "constant" or step < r.warmup:
        return rising
    done = (step - r.warmup) / max(1, r.steps - r.warmup)
    return rising * (1 - done if r.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def batch_of(examples: Sequence[Example], recipe: Recipe, step: int) -> list[Example]:
    """Return the examples of a step. A step may cross the boundary between two epochs."""
    batch = []
    for place in range(step * recipe.batch, (step + 1) * recipe.batch):
        epoch, index = divmod(place, len(examples))
        if recipe.shuffle is not None:
            index = _order(len(examples), recipe.shuffle, epoch)[index]
        batch.append(examples[index])
    return batch


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def within(examples: Sequence[Example], most: int) -> tuple[list[Example], int]:
    """Return the examples of at most ``most`` tokens, and the number of longer examples."""
    kept = [example for example in examples if len(example.tokens) <= most]
    return kept, len(examples) - len(kept)


def context_of(model: Path) -> int:
    """Return the context length of a model in tokens, or 2^31 if its config does not state it."""
    text = AutoConfig.from_pretrained(model).get_text_config()
    return getattr(text, "max_position_embeddings", None) or 2**31


def fine_tune(
    model: Path,
    examples: Sequence[Example],
    out: Path,
    recipe: Recipe,
    threads: int,
    held_out: Sequence[Example] = (),
) -> Losses:
    """Call ``train`` and put the model into the folder ``out``, which appears complete or not at
    all and replaces an existing folder."""
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
    """Train ``model`` for ``recipe.steps`` batches, and save it as a Hugging Face model with merged
    adapters in ``folder``.

    Raises ValueError if the model changes the logits of its head, and torch.OutOfMemoryError.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.shuffle or 0)
    student = Student(model, recipe)
    optimizer = torch.optim.AdamW(
        student.trained(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
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
            print(
                f"  step {step + 1} of {recipe.steps}: loss {loss:.3f}, {seen} tokens, {spent:.0f} s",
                flush=True,
            )
    spent = time.monotonic() - start
    after = student.measure(held_out) if before is not None else None
    if after is not None:
        print(f"  held-out loss {after:.4f}, before {before:.4f}", flush=True)
    student.save(folder)
    return Losses(loss, None if before is None or after is None else (before, after), spent)


class Student:
    """The model in training, with float32 weights, products in the recipe's dtype, and adapters if
    configured. ``save`` must be the last call."""

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
        """The causal LM without any adapters."""
        return self.model.get_base_model() if self.recipe.lora_rank else self.model

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that train."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def learn(self, batch: Sequence[Example]) -> float:
        """Add the gradient of the batch's loss, and return that loss."""
        loss, targets = 0.0, _targets(batch)
        for part in parts(batch, self.recipe):
            share = _targets(part) / targets
            part_loss = self.loss(part)
            (part_loss * share).backward()
            loss += part_loss.item() * share
        return loss

    @torch.no_grad()
    def measure(self, examples: Sequence[Example]) -> float:
        """Return the mean loss over the completion tokens of some examples."""
        self.model.eval()
        size = self.recipe.batch
        batches = [examples[i : i + size] for i in range(0, len(examples), size)]
        shares = [part for batch in batches for part in parts(batch, self.recipe)]
        loss = math.fsum(self.loss(part).item() * _targets(part) for part in shares) / _targets(
            examples
        )
        self.model.train()
        return loss

    def loss(self, batch: Sequence[Example]) -> torch.Tensor:
        """Return the mean negative log-probability of the completion tokens of one forward."""
        read = self._packed if self.recipe.packing else self._padded
        with torch.autocast(
            self.device, dtype=torch.bfloat16, enabled=self.compute == torch.bfloat16
        ):
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
        return read, torch.tensor(
            [t for e in batch for t in e.tokens[e.start :]], device=self.device
        )

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
        """Write bfloat16 weights with merged adapters, and the tokenizer. Raises OSError if the
        disk does not take them."""
        whole = self.model.merge_and_unload() if self.recipe.lora_rank else self.model
        try:
            whole.to(torch.bfloat16).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.folder).save_pretrained(folder)
        except (OSError, SafetensorError) as error:
            raise OSError(f"the trained model could not be written to {folder}: {error}") from None


def parts(batch: Sequence[Example], recipe: Recipe) -> list[list[Example]]:
    """Cut a batch into forwards of at most ``recipe.forward_tokens`` and similar examples. A longer
    example is a forward of its own."""
    if not recipe.forward_tokens:
        return [list(batch)]
    if recipe.packing:
        groups, _ = micro_batches(
            cuts([TokenPath(e.tokens, e.start) for e in batch]), recipe.forward_tokens
        )
        return [[batch[i] for i in group] for group in groups]
    forwards: list[list[Example]] = []
    for example in sorted(batch, key=lambda e: len(e.tokens)):
        if not forwards or (len(forwards[-1]) + 1) * len(example.tokens) > recipe.forward_tokens:
            forwards.append([])
        forwards[-1].append(example)
    return forwards


def _targets(examples: Sequence[Example]) -> int:
    return sum(len(e.tokens) - e.start for e in examples)
