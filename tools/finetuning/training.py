"""The stages of coppice sft that make a model folder: train and warm-start."""

import argparse
import itertools
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coppice.common import jsonl, vision
from coppice.common.atomic import write_whole
from coppice.tools.finetuning.labels import TrainingRow

if TYPE_CHECKING:
    from coppice.learner.fine_tune import Example  # which imports torch
    from coppice.scheduler.growth.text import Text


def train(options: argparse.Namespace, folder: Path) -> None:
    from torch import OutOfMemoryError
    from transformers import AutoConfig
    from transformers.utils import logging

    from coppice.learner import fine_tune
    from coppice.learner.fine_tune import Recipe
    from coppice.scheduler.growth.text import Text
    from coppice.tools.defaults.models import ensure_model
    from coppice.tools.defaults.settings import cache_folder

    logging.disable_progress_bar()
    model = ensure_model(options.model, cache_folder())
    end = _end_token(model) if options.end_token else []
    examples = read_rows(options.rows, Text(str(model)), end)
    context = vision.context_of(AutoConfig.from_pretrained(model).get_text_config())
    limit = min(options.max_tokens or context, context)
    kept = [example for example in examples if len(example.tokens) <= limit]
    long = len(examples) - len(kept)
    if long:
        print(f"{long} of {len(examples)} rows are longer than {limit} tokens and left out")
    learnt, held_out = split(kept, options.held_out, options.seed)
    if not learnt:
        counts = f"{len(examples)} read, {long} too long, {len(held_out)} held out"
        raise ValueError(f"{options.rows}: no row is left to learn from ({counts})")
    steps = options.steps or math.ceil(options.epochs * len(learnt) / options.batch)
    recipe = Recipe(
        steps=steps, batch=options.batch, lr=options.lr, schedule="cosine",
        warmup=round(options.warmup_ratio * steps), shuffle=options.seed,
        lora_rank=options.lora_rank, lora_alpha=32.0, packing=True,
        forward_tokens=options.forward_tokens,
    )  # fmt: skip
    sizes = f"{len(learnt)} rows, {len(held_out)} held out"
    print(f"{sizes}, {steps} steps of {options.batch}", flush=True)
    try:
        losses = fine_tune.train(model, learnt, folder, recipe, options.threads, held_out)
    except OutOfMemoryError as error:
        reason = str(error).split("\n")[0]
        remedy = "train adapters (--lora-rank 16), or less at once (--forward-tokens)"
        raise MemoryError(f"{reason}: {remedy}") from None
    counts = {"rows": len(learnt), "held_out_rows": len(held_out), "too_long": long}
    write_whole(folder / "sft.json", counts | {"recipe": recipe, "losses": losses})


def read_rows(path: Path, text: "Text", end: Sequence[int] = ()) -> "list[Example]":
    """Read the rows {prompt or messages, completion} of a JSONL file as examples in the chat
    format. end: tokens after each completion.

    Raises ValueError if there is no such file, or with the number of a bad line.
    """
    from coppice.learner.fine_tune import Example

    examples = []
    expected = "{prompt, completion} or {messages, completion} (docs/sft.md)"
    for number, row in jsonl.lines(path, TrainingRow, expected, "--rows"):
        if bool(row.prompt) == bool(row.messages):
            which = f"{'both' if row.prompt else 'neither'} of prompt and messages"
            raise ValueError(f"{path}:{number}: {which}; expected {expected}")
        own = [{"role": "user", "content": row.prompt}]
        chat = list(msgspec.to_builtins(row.messages)) or own
        prompt = text.encode(row.prompt if row.rendered else text.prompt(chat)).tolist()
        completion = text.encode(row.completion).tolist()
        if not completion:
            empty = "the completion is empty: expected a text to learn; remove that line"
            raise ValueError(f"{path}:{number}: {empty}")
        examples.append(Example(prompt + completion + list(end), len(prompt), row.group))
    if not examples:
        raise ValueError(f"{path} holds no example: expected lines of {expected}")
    return examples


def split(
    examples: Sequence["Example"], share: float, seed: int
) -> "tuple[list[Example], list[Example]]":
    """Return rows to learn and held-out rows. A group stays on one side. If share > 0, at least one
    of several groups is held out."""
    groups: dict[str | int, list[Example]] = {}
    for number, example in enumerate(examples):
        groups.setdefault(example.group or number, []).append(example)
    order = list(groups.values())
    random.Random(f"held-out/{seed}").shuffle(order)
    wanted = max(1, round(share * len(examples))) if share else 0
    count = held = 0
    while held < wanted and count < len(order) - 1:
        held += len(order[count])
        count += 1
    return list(itertools.chain(*order[count:])), list(itertools.chain(*order[:count]))


def _end_token(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    end_token = AutoTokenizer.from_pretrained(model).eos_token_id
    if end_token is None:
        raise ValueError(f"{model} names no end token (eos_token): give --no-end-token")
    return [end_token]


def warm_start(options: argparse.Namespace, folder: Path) -> None:
    """Copy the policy with which the runs of a config begin to a model folder."""
    from coppice.tools.launching.config import load
    from coppice.tools.launching.prepare import prepare

    model = prepare(load(options.config, options.set)).model
    shutil.copytree(model, folder, dirs_exist_ok=True)
