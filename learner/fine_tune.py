"""Supervised fine-tuning of a causal language model, full or with LoRA. The loss is the mean over
the batch's completion tokens, no matter how the batch is cut into forwards. Packing reads a batch
as one forest (learner/forest/trees.py)."""

import functools
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from coppice.common import vision
from coppice.common.hardware import compute_dtype, torch_device
from coppice.learner.forest.attention import NAME, Layout
from coppice.learner.forest.head import token_logprobs
from coppice.learner.forest.trees import Path as TokenPath
from coppice.learner.forest.trees import cuts, micro_batches, pack
from coppice.learner.model.adapters import install
from coppice.learner.model.model import Tower, check_layers

_LINES = 10
"""The approximate number of progress lines per training."""


class Example(msgspec.Struct, frozen=True):
    """Token ids, of which those from ``start`` on enter the loss. group: rows of one group are held
    out together; "" for a row of its own."""

    tokens: list[int]
    start: int
    group: str = ""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps: int
    batch: int
    """Examples per step."""
    lr: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, the rate stays constant or falls to 0 over the remaining steps."""
    warmup: int = 0
    """First steps, in which the rate rises."""
    cooldown: int = 0
    """Last steps, in which the rate falls towards 0."""
    shuffle: int | None = None
    """The seed of a new order in each epoch; None keeps the order of the examples."""
    lora_rank: int = 0
    """With 0, all weights train."""
    lora_alpha: float = 32.0
    packing: bool = False
    forward_tokens: int = 0
    """The most tokens of one forward; 0 forwards a batch at once."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The number type of the products; "auto" chooses the best one for this machine."""


class Losses(msgspec.Struct, frozen=True):
    """The losses of a training. held_out: mean over held-out completion tokens before and after."""

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
    places = range(step * recipe.batch, (step + 1) * recipe.batch)
    pairs = (divmod(place, len(examples)) for place in places)
    return [examples[_order(len(examples), recipe.shuffle, epoch)[i]] for epoch, i in pairs]


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int | None, epoch: int) -> list[int]:
    order = list(range(count))
    if seed is not None:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def train(
    model: Path, examples: Sequence[Example], folder: Path, recipe: Recipe, threads: int,
    held_out: Sequence[Example] = (),
) -> Losses:  # fmt: skip
    """Train ``model`` for ``recipe.steps`` batches, and save it as a Hugging Face model with merged
    adapters in ``folder``. Raises ValueError if the model changes the logits of its head."""
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.shuffle or 0)
    student = Student(model, recipe)
    optimizer = torch.optim.AdamW(student.trained(), betas=(0.9, 0.95), weight_decay=0.0)
    before, held_out_losses = student.measure(held_out) if held_out else None, None
    if before is not None:
        print(f"  held-out loss {before:.4f} over {len(held_out)} rows", flush=True)
    start, seen, loss, spent = time.monotonic(), 0, math.nan, 0.0
    for step in range(recipe.steps):
        batch = batch_of(examples, recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step)
        loss = student.learn(batch)
        torch.nn.utils.clip_grad_norm_(student.trained(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += sum(len(e.tokens) for e in batch)
        done, spent = step + 1, time.monotonic() - start
        if done % -(-recipe.steps // _LINES) == 0 or done == recipe.steps:
            told = f"loss {loss:.3f}, {seen} tokens, {spent:.0f} s"
            print(f"  step {done} of {recipe.steps}: {told}", flush=True)
    if before is not None:
        after = student.measure(held_out)
        print(f"  held-out loss {after:.4f}, before {before:.4f}", flush=True)
        held_out_losses = before, after
    student.save(folder)
    return Losses(loss, held_out_losses, spent)


class Student:
    """The model in training, with float32 weights, products in the recipe's dtype, and adapters if
    configured. ``save`` must be the last call."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.folder, self.recipe = folder, recipe
        self.device = torch_device()
        self.compute = getattr(torch, compute_dtype(recipe.dtype))
        attention = {"attn_implementation": NAME} if recipe.packing else {}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention)
        vision.check_head(folder, model.config.get_text_config())
        self._recurrent = recipe.packing and check_layers(str(folder), model)
        self.causal: Any = model
        """The causal LM without any adapters."""
        if recipe.lora_rank:
            settings: Any = {"r": recipe.lora_rank, "lora_alpha": recipe.lora_alpha}
            adapters = LoraConfig(target_modules="all-linear", lora_dropout=0.0, **settings)
            model = get_peft_model(model, adapters)
            install(model)
        self.model: Any = model.to(self.device).train()

    def trained(self) -> list[torch.nn.Parameter]:
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
        total = math.fsum(self.loss(part).item() * _targets(part) for part in shares)
        self.model.train()
        return total / _targets(examples)

    def loss(self, batch: Sequence[Example]) -> torch.Tensor:
        """Return the mean negative log-probability of the completion tokens of one forward."""
        if self.recipe.packing:
            forest = pack([TokenPath(e.tokens, e.start) for e in batch])
            layout = Layout(forest, "auto", self.device)
            tower = Tower(self.model, 1.0, False, self._recurrent)
            return -tower(layout, layout.forest.depth, None, self.compute, False)[0].mean()
        narrow = self.compute == torch.bfloat16
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=narrow):
            hidden, targets = self._padded(batch)
            weight = self.causal.get_output_embeddings().weight
            return -token_logprobs(hidden, weight, targets)[0].mean()

    def _padded(self, batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.tensor(e.tokens, device=self.device) for e in batch]
        padded = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        ids, mask = padded(rows), padded([torch.ones_like(row) for row in rows])
        decoder = self.causal.get_decoder()
        hidden = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        read = torch.cat([hidden[i, e.start - 1 : len(e.tokens) - 1] for i, e in enumerate(batch)])
        targets = [token for e in batch for token in e.tokens[e.start :]]
        return read, torch.tensor(targets, device=self.device)

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
        where = cuts([TokenPath(e.tokens, e.start) for e in batch])
        groups, _ = micro_batches(where, recipe.forward_tokens)
        return [[batch[i] for i in group] for group in groups]
    forwards: list[list[Example]] = []
    for example in sorted(batch, key=lambda e: len(e.tokens)):
        if not forwards or (len(forwards[-1]) + 1) * len(example.tokens) > recipe.forward_tokens:
            forwards.append([])
        forwards[-1].append(example)
    return forwards


def _targets(examples: Sequence[Example]) -> int:
    return sum(len(e.tokens) - e.start for e in examples)
