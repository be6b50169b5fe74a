"""Supervised warm start: a few steps on synthetic traces, so that the policy writes actions at all; stopped early on purpose.

Traces are made from the warm split only (no entity of the held-out split), with the real index's passages, in exactly the token
format of a rollout; the loss covers the action tokens alone. The same trainer serves ``tools/sft`` on rows of {prompt, completion}.
"""

import argparse
import hashlib
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.environments.search_qa import SearchQA
from judges.retriever.encoder import Encoder
from judges.retriever.index import Index
from learner.head import token_logprobs
from scheduler.text import Text
from tools.facts import Fact
from wire.hardware import compute_dtype
from wire.messages import Passage

_NEED = (
    "I need the {field} of {title}.",
    "To answer, I must look up the {field} of {title}.",
    "I should search for {title} and its {field}.",
    "Let me find the {field} of {title}.",
)
_BRIDGE = (
    "First I need the one whose {field} is {value}.",
    "I must find which has {field} {value}.",
    "Let me find out what has the {field} {value}.",
)
_KNOWN = ("The {field} is {value}.", "It says that the {field} of {title} is {value}.", "Now I know: {value}.")


_LINES = 10
"""Progress lines of a training, about."""


class WarmStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [warm_start]. steps 0 switches it off. two_hop: share of two-hop questions among the traces' questions."""

    steps: int = 7
    rows: int = 8
    lr: float = 1e-4
    warmup: int = 4
    two_hop: float = 0.5
    seed: int = 1


class Example(msgspec.Struct, frozen=True):
    """Token ids; the loss covers those from ``start`` on."""

    tokens: list[int]
    start: int


class _Row(msgspec.Struct):
    question: str
    golden_answers: list[str]
    evidence: list[Fact]
    hops: int


def traces(
    rows: Sequence[_Row], text: Text, environment: SearchQA, index: Index, count: int, config: WarmStart
) -> list[Example]:
    """``count`` single turns of synthetic episodes, shuffled."""
    rng = random.Random(config.seed)
    by_hops = {
        hops: rng.sample([r for r in rows if r.hops == hops], k=sum(r.hops == hops for r in rows)) for hops in (1, 2)
    }
    made: list[Example] = []
    while len(made) < count and any(by_hops.values()):
        wanted = 2 if rng.random() < config.two_hop else 1
        made += _episode((by_hops[wanted] or by_hops[3 - wanted]).pop(), text, environment, index, rng)
    rng.shuffle(made)
    return made[:count]


def _episode(row: _Row, text: Text, environment: SearchQA, index: Index, rng: random.Random) -> list[Example]:
    prompt = text.prompt([{"role": "user", "content": environment.template.replace("{question}", row.question)}])
    tokens, made = text.encode(prompt).tolist(), []

    def turn(action: str) -> None:
        ids = text.encode(action).tolist()
        made.append(Example(tokens + ids, len(tokens)))
        tokens.extend(ids)

    for hop, fact in enumerate(row.evidence):
        field = fact.field.lower()
        words = {"field": field, "title": fact.title, "value": fact.value}
        if hop == 0 and len(row.evidence) == 2:
            think, query = rng.choice(_BRIDGE), f"{field} {fact.value}"
        else:
            think, query = rng.choice(_NEED), f"{fact.title} {field}"
        turn(f"<think> {think.format(**words)} </think> <search> {query} </search>")
        (passages,) = index.search([query], environment.topk)
        shown = f"{fact.field}: {fact.value}"
        if not any(p.title == fact.title and p.text == shown for p in passages):
            passages[0] = Passage(fact.passage_id, fact.title, shown, 1.0)
        tokens.extend(text.encode(environment.render(passages)).tolist())
    last = row.evidence[-1]
    think = rng.choice(_KNOWN).format(field=last.field.lower(), title=last.title, value=last.value)
    turn(f"<think> {think} </think> <answer> {row.golden_answers[0]} </answer>")
    return made


def fine_tune(
    model: Path,
    examples: Sequence[Example],
    out: Path,
    steps: int,
    rows: int,
    lr: float,
    warmup: int,
    threads: int,
    cooldown: int = 0,
) -> None:
    """Full fine-tuning for ``steps`` batches of ``rows`` examples; the result is a Hugging Face folder at ``out``.

    The learning rate rises over the first ``warmup`` steps and falls over the last ``cooldown``.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compute = getattr(torch, compute_dtype("auto"))
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = policy.to(device).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    start, seen = time.monotonic(), 0
    for step in range(steps):
        batch = [examples[(step * rows + i) % len(examples)] for i in range(rows)]
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, warmup), (steps - step) / max(1, cooldown))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=compute == torch.bfloat16):
            loss = _loss(policy, batch, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += sum(len(e.tokens) for e in batch)
        spent = time.monotonic() - start
        if (step + 1) % -(-steps // _LINES) == 0 or step + 1 == steps:
            print(f"  step {step + 1} of {steps}: loss {loss.item():.3f}, {seen} tokens, {spent:.0f} s", flush=True)
    draft = out.with_name(f"{out.name}.draft{os.getpid()}")
    policy.to(torch.bfloat16).save_pretrained(draft)
    AutoTokenizer.from_pretrained(model).save_pretrained(draft)
    shutil.rmtree(out, ignore_errors=True)
    draft.rename(out)


def _loss(policy: Any, batch: Sequence[Example], device: str) -> torch.Tensor:
    """Mean negative log-probability of the action tokens of a right-padded batch."""
    longest = max(len(e.tokens) for e in batch)
    ids = np.zeros((len(batch), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, example in enumerate(batch):
        ids[row, : len(example.tokens)] = example.tokens
        mask[row, : len(example.tokens)] = 1
    hidden = policy.get_decoder()(
        input_ids=torch.tensor(ids, device=device), attention_mask=torch.tensor(mask, device=device), use_cache=False
    ).last_hidden_state
    read = torch.cat([hidden[i, e.start - 1 : len(e.tokens) - 1] for i, e in enumerate(batch)])
    targets = torch.tensor([t for e in batch for t in e.tokens[e.start :]], device=device)
    return -token_logprobs(read, policy.get_output_embeddings().weight, targets)[0].mean()


def ensure_warm_start(
    model: Path,
    facts: Path,
    index: Path,
    encoder: str,
    environment: SearchQA,
    config: WarmStart,
    cache: Path,
    threads: int,
) -> Path:
    """The warm-started model, cached by everything it depends on; ``model`` itself when config.steps is 0."""
    if config.steps == 0:
        return model
    source = facts / "warm.jsonl"
    recipe = [str(model), environment.template, environment.topk, msgspec.to_builtins(config), encoder]
    key = hashlib.sha256(msgspec.json.encode(recipe) + source.read_bytes()).hexdigest()[:16]
    out = cache / "warm_start" / key
    if (out / "config.json").is_file():
        return out
    print(f"supervised warm start, {config.steps} steps of {config.rows} examples (cached afterwards)", flush=True)
    torch.set_num_threads(threads)
    rows = [msgspec.json.decode(line, type=_Row) for line in source.read_bytes().splitlines() if line.strip()]
    examples = traces(
        rows, Text(str(model)), environment, Index(index, Encoder(encoder, threads)), config.steps * config.rows, config
    )
    fine_tune(model, examples, out, config.steps, config.rows, config.lr, config.warmup, threads)
    return out


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    completion: str


def read_pairs(path: Path, text: Text) -> list[Example]:
    """Examples of a JSONL file of {prompt, completion}; the prompt is put into the chat format. Raises ValueError with the line."""
    made = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            pair = msgspec.json.decode(line, type=_Pair)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: {error} (expected {{prompt, completion}})") from None
        prompt = text.encode(text.prompt([{"role": "user", "content": pair.prompt}])).tolist()
        made.append(Example(prompt + text.encode(pair.completion).tolist(), len(prompt)))
    if not made:
        raise ValueError(f"{path} holds no example: expected lines of {{prompt, completion}}")
    return made


def main() -> None:
    """The command tools/sft."""
    parser = argparse.ArgumentParser(
        prog="tools/sft", description="Supervised fine-tuning on {prompt, completion} rows."
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rows", required=True, type=Path, help="JSONL of {prompt, completion}")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    examples = read_pairs(given.rows, Text(str(given.model)))
    fine_tune(given.model, examples, given.out, given.steps, given.batch, given.lr, 4, given.threads)
    print(f"model in {given.out}")
