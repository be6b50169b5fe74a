"""The stages of coppice sft that make a model folder: train and warm-start. The folder appears whole
or not at all."""

import argparse
import math
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coppice.common.atomic import drafted, write_whole

if TYPE_CHECKING:
    from coppice.learner.fine_tune import Example  # which imports torch


def train(options: argparse.Namespace) -> None:
    """Fine-tune a model on rows and write a model folder."""
    _check_new(options.out)
    _check(options)
    with drafted(options.out, "--out") as draft:
        _train(options, draft)
    print(f"model in {options.out}")


def _train(options: argparse.Namespace, folder: Path) -> None:
    from torch import OutOfMemoryError
    from transformers.utils import logging

    from coppice.learner import fine_tune
    from coppice.learner.fine_tune import Recipe, context_of, within
    from coppice.scheduler.growth.text import Text
    from coppice.tools.defaults.models import ensure_model
    from coppice.tools.defaults.settings import cache_folder
    from coppice.tools.finetuning.pairs import read_pairs

    logging.disable_progress_bar()
    model = ensure_model(options.model, cache_folder())
    end = _end_token(model) if options.end_token else []
    examples = read_pairs(options.rows, Text(str(model)), end)
    limit = min(options.max_tokens or context_of(model), context_of(model))
    kept, long = within(examples, limit)
    if long:
        print(
            f"{long} of {len(examples)} rows are longer than {limit} tokens and left out",
            flush=True,
        )
    learnt, held_out = split(kept, options.held_out, options.seed)
    if not learnt:
        raise ValueError(
            f"{options.rows}: no row is left to learn from ({len(examples)} read, {long} too long, {len(held_out)} held out)"
        )
    steps = options.steps or math.ceil(options.epochs * len(learnt) / options.batch)
    recipe = Recipe(
        steps=steps, batch=options.batch, lr=options.lr, schedule=options.schedule, warmup=round(options.warmup_ratio * steps),
        shuffle=options.seed, lora_rank=options.lora_rank, lora_alpha=options.lora_alpha, packing=options.packing,
        forward_tokens=options.forward_tokens,
    )  # fmt: skip
    print(
        f"{len(learnt)} rows, {len(held_out)} held out, {steps} steps of {options.batch}",
        flush=True,
    )
    try:
        losses = fine_tune.train(model, learnt, folder, recipe, options.threads, held_out)
    except OutOfMemoryError as error:
        reason = str(error).split("\n")[0]
        raise MemoryError(
            f"{reason}: train adapters (--lora-rank 16), or less at once (--forward-tokens)"
        ) from None
    summary = {
        "rows": len(learnt),
        "held_out_rows": len(held_out),
        "too_long": long,
        "recipe": recipe,
        "losses": losses,
    }
    write_whole(folder / "sft.json", summary)


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ValueError(f"--out {out} exists: choose another folder, or remove that one")


def _check(options: argparse.Namespace) -> None:
    for name in ("batch", "lr", "epochs", "steps", "threads", "max_tokens"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(options, name):g}: expected more than 0"
            )
    for flag, share in (("--held-out", options.held_out), ("--warmup-ratio", options.warmup_ratio)):
        if not 0 <= share < 1:
            raise ValueError(f"{flag} {share:g}: expected a share, 0 to less than 1")
    for name in ("lora_rank", "forward_tokens"):
        if getattr(options, name) < 0:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(options, name)}: expected 0 or more"
            )


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
    return [one for group in order[count:] for one in group], [
        one for group in order[:count] for one in group
    ]


def _end_token(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    end_token = AutoTokenizer.from_pretrained(model).eos_token_id
    if end_token is None:
        raise ValueError(f"{model} names no end token (eos_token): give --no-end-token")
    return [end_token]


def warm_start(options: argparse.Namespace) -> None:
    """Copy the policy with which the runs of a config begin to a new model folder."""
    _check_new(options.out)
    from coppice.tools.launching.config import load
    from coppice.tools.launching.prepare import prepare

    with drafted(options.out, "--out") as draft:
        model = prepare(load(options.config, options.set)).model
        shutil.copytree(model, draft, dirs_exist_ok=True)
    print(f"model in {options.out} (the copy of {model})")
