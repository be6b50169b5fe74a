"""A suite through which any packer of prefix trees can be run: trees with answers known by hand,
gradients against path-by-path training in float64, and counts of what packing costs.

``python -m coppice.research.packers ours my_packer.py`` runs it. A packer is a module with

- ``attention``: the attention implementation of transformers that it needs
- ``prepare(paths)``: the paths (``TrainedPath``) in the form that it takes; not timed
- ``pack(batch)``: what ``prepare`` returned, packed; timed
- ``count(packed)``: its ``PackCounts``
- ``logprobs(model, packed)``: the weight and, with its gradient, the log-probability of each
  trained target, float64 [targets]
- ``lacks(case)``, optional: why a case cannot run, by the packer's documents, or ""

Two targets that the packer merged into one have the sum of their weights. ``model`` is a causal LM
of transformers with random weights in float64; ``head`` computes log-probabilities of hidden
states. Kernels that need a GPU can be replaced by ``causal_attention``.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig, MistralConfig

from coppice.common.options import plugin

BOUND = 1e-11
"""The largest relative distance of gradients that float64 rounding explains."""
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2,
}  # fmt: skip


class TrainedPath(msgspec.Struct, frozen=True):
    """All tokens up to the end of one action, the index ``start`` (>= 1) at which the action
    begins, and the weight of its targets in the loss, which is exact in float32."""

    tokens: list[int]
    start: int
    weight: float


class PackCounts(msgspec.Struct, frozen=True):
    """What one layer computes: tokens forwarded, rows of keys (and as many of values) and rows of
    queries that its attention reads, and pairs of query and key that it multiplies; without
    padding."""

    tokens: int
    key_rows: int
    query_rows: int
    pairs: int


class PackingCase(msgspec.Struct, frozen=True):
    """Paths with the numbers of their trie's nodes and of their targets, counted by hand."""

    paths: list[TrainedPath]
    unique: int
    targets: int
    config: Any = LlamaConfig(**SHAPE)


def _weighted(*paths: tuple[list[int], int]) -> list[TrainedPath]:
    weights = (1.0, -0.25, 0.5, 2.0, -1.5)
    return [TrainedPath(*path, weights[i % 5]) for i, path in enumerate(paths)]


def _words(vocabulary: int) -> Callable[[int], list[int]]:
    draw = torch.Generator().manual_seed(0)
    return lambda count: torch.randint(vocabulary, (count,), generator=draw).tolist()


def step_candidates(
    words: Callable[[int], list[int]], question: int, steps: int, candidates: int, action: int,
    after: int,
) -> list[tuple[list[int], int]]:  # fmt: skip
    """Make candidates from one prefix at every step, the first of which is continued."""
    paths, prefix = [], words(question)
    for _ in range(steps):
        # its own first token keeps a candidate from sharing more by chance
        actions = [[first, *words(action - 1)] for first in range(candidates)]
        paths += [(prefix + one, len(prefix)) for one in actions]
        prefix = prefix + actions[0] + words(after)
    return paths


def _branches(
    words: Callable[[int], list[int]], depth: int, prefix: list[int]
) -> list[tuple[list[int], int]]:
    """Make whole paths through a tree that branches three times after every 50 tokens."""
    prefix = prefix + words(50)
    if not depth:
        return [(prefix, 50)]
    return [path for _ in range(3) for path in _branches(words, depth - 1, prefix)]


_LONG = [1, 2, 3, 4, 5, 10, 11]
NESTED = _weighted(
    ([1, 2, 3, 4, 5], 3), ([1, 2, 3, 6], 3), ([1, 2, 3, 7, 8, 9], 3), ([*_LONG, 12, 13], 7),
    ([*_LONG, 14], 7),
)  # fmt: skip
GROUP = _weighted(([1, 2, 3, 4, 5], 3), ([1, 2, 3, 6, 7], 3), ([1, 2, 3, 8, 9], 3))
UNBALANCED = _weighted(
    ([1, 2, 3, 4, 5, 6, 7, 8], 1), ([1, 9], 1), ([1, 2, 3, 10, 11], 3), ([1, 2, 3, 4, 5], 3)
)
CASES = {
    "one path": PackingCase(_weighted(([1, 2, 3, 4, 5], 3)), 5, 2),
    "group": PackingCase(GROUP, 9, 6),
    "one-token branches": PackingCase(_weighted(*(([1, 2, 3 + i], 2) for i in range(4))), 6, 4),
    "nested": PackingCase(NESTED, 14, 9),
    "unbalanced, one path ends in another": PackingCase(UNBALANCED, 11, 12),
    "two roots": PackingCase(_weighted(([1, 2, 3], 1), ([4, 2, 3], 1)), 6, 4),
    "duplicates": PackingCase(
        _weighted(([1, 2, 3, 4], 2), ([1, 2, 3, 4], 2), ([1, 2, 5], 2)), 5, 5
    ),
    "300 tokens": PackingCase(_weighted(*step_candidates(_words(64), 60, 3, 3, 20, 30)), 300, 180),
    "sliding window": PackingCase(NESTED, 14, 9, MistralConfig(**SHAPE, sliding_window=4)),
    "grouped heads": PackingCase(NESTED, 14, 9, LlamaConfig(**SHAPE | {"num_key_value_heads": 2})),
    "one key head": PackingCase(NESTED, 14, 9, LlamaConfig(**SHAPE | {"num_key_value_heads": 1})),
    "recurrent layers": PackingCase(
        NESTED, 14, 9, Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])
    ),
}


# ------------------------------------------------------------------------------------ for packers


def head(causal: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of ``targets`` [targets] after ``hidden`` [targets, width]."""
    logits = hidden @ causal.get_output_embeddings().weight.T
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    window: int | None = None, padded: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of the last tokens of rows: query [rows, heads, queries, width]; key and
    value [rows, key heads, keys, width], which end where the queries do. window: the keys that a
    query reads. padded: bool [rows, keys], the keys that none reads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    queries, keys = query.shape[2], key.shape[2]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
    allowed = (distance >= 0) & (distance < (window or keys))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, float("-inf"))
    if padded is not None:
        # the lowest number, not -inf: a padded query reads nothing, and is read by nothing
        scores = scores.masked_fill(padded[:, None, None], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value


def unique(paths: Sequence[TrainedPath]) -> tuple[int, int]:
    """Return the nodes of the trie of ``paths``, and the pairs of a node and an ancestor or
    itself."""
    children: dict[tuple[int, int], int] = {}
    pairs = 0
    for path in paths:
        node = 0
        for depth, token in enumerate(path.tokens, 1):
            if (node, token) not in children:
                pairs += depth
            node = children.setdefault((node, token), len(children) + 1)
    return len(children), pairs


# -------------------------------------------------------------------------------------- the suite


class _Norm(torch.nn.Module):
    """RMSNorm in the precision of its input: transformers' casts to float32."""

    def __init__(self, weight: torch.Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def model(config: Any, attention: str) -> Any:
    """Return a causal LM with random weights in float64, the same at every call."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # a model reads its attention from its config
    causal = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    for module in list(causal.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, _Norm(child.weight, child.variance_epsilon))
    return causal.train()


def _gradient(causal: Any, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return torch.cat([p.grad.flatten() for p in causal.parameters()])


def by_path(case: PackingCase) -> torch.Tensor:
    """Return the gradient [parameters] of training every path alone."""
    causal, loss = model(case.config, "sdpa"), torch.zeros(())
    for path in case.paths:
        ids, read = torch.tensor(path.tokens), slice(path.start - 1, -1)
        hidden = causal.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        loss = loss + path.weight * head(causal, hidden[read], ids[path.start :]).sum()
    return _gradient(causal, loss)


def check(packer: Any, case: PackingCase) -> dict[str, Any]:
    """Run a case: its counts, trained targets, the share of the weights that they have, and the
    relative distance of the gradient from path by path. A case that does not run has ``reason``."""
    if reason := getattr(packer, "lacks", lambda case: "")(case):
        return {"reason": reason}
    try:
        packed = packer.pack(packer.prepare(case.paths))
        causal, expected = model(case.config, packer.attention), by_path(case)
        weights, logprobs = packer.logprobs(causal, packed)
        got = _gradient(causal, (weights * logprobs).sum())
        counts = packer.count(packed)
    except Exception as error:  # noqa: BLE001  a foreign packer may raise anything
        return {"reason": f"raised {type(error).__name__}: {error}"[:300]}
    total = sum(path.weight * (len(path.tokens) - path.start) for path in case.paths)
    return msgspec.to_builtins(counts) | {
        "unique": case.unique, "targets": len(weights), "of_targets": case.targets,
        "weight": float(weights.sum()) / total,
        "gradient": float((got - expected).norm() / expected.norm()),
    }  # fmt: skip


def loads() -> dict[str, list[TrainedPath]]:
    """Return the batches whose packing is counted and timed."""
    words = _words(49152)
    groups = [path for _ in range(8) for path in step_candidates(words, 500, 1, 8, 100, 0)]
    slate = [path for _ in range(8) for path in step_candidates(words, 200, 3, 5, 80, 400)]
    return {
        "8 groups of 8": _weighted(*groups),
        "SLATE, 8 questions, 3 steps of 5": _weighted(*slate),
        "SLATE, 20 steps of 5": _weighted(*step_candidates(words, 200, 20, 5, 80, 400)),
        "depth 5, branching 3": _weighted(*_branches(words, 5, [])),
    }


def measure(packers: dict[str, Any], paths: list[TrainedPath], rounds: int) -> dict[str, Any]:
    """Return for each packer its counts, relative to the trie's, and the median ratio of its CPU
    time of packing to the first packer's, in rounds that take turns."""
    nodes, pairs = unique(paths)
    batches = {name: packer.prepare(paths) for name, packer in packers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in packers}
    packed: dict[str, Any] = {}
    for _ in range(rounds):
        for name, packer in packers.items():
            start = time.process_time()
            packed[name] = packer.pack(batches[name])
            seconds[name].append(time.process_time() - start)
    rows, first = {}, seconds[next(iter(packers))]
    for name, packer in packers.items():
        counts = packer.count(packed[name])
        ratios = [mine / its for mine, its in zip(seconds[name], first, strict=True)]
        rows[name] = {
            "tokens": counts.tokens / nodes, "key_rows": counts.key_rows / nodes,
            "query_rows": counts.query_rows / nodes, "pairs": counts.pairs / pairs,
            "time": statistics.median(ratios),
        }  # fmt: skip
    return {"nodes": nodes, "packers": rows}


def load(name: str) -> Any:
    """Return a packer of this folder, or that of a file of Python."""
    place = f"{name}:pack" if name.endswith(".py") else name
    return plugin("packers", place, __name__, "pack")[0]


def report(names: Sequence[str], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the packers through all cases and batches; tell a table, return every value."""
    torch.set_num_threads(1)
    packers = {Path(name).stem: load(name) for name in names}
    cases: dict[str, Any] = {name: {} for name in packers}
    for name, packer in packers.items():
        say(f"\n{name:<38} tokens (trie)  targets  weight  gradient")
        for title, case in CASES.items():
            row = cases[name][title] = check(packer, case)
            if "reason" in row:
                say(f"{title:<38} {row['reason']}")
                continue
            verdict = "" if row["gradient"] < BOUND else "  DIFFERS"
            tokens = f"{row['tokens']:>6} ({row['unique']:>4})"
            targets = f"{row['targets']:>3}/{row['of_targets']:<3}"
            gradient = f"{row['weight']:6.3f}  {row['gradient']:.1e}{verdict}"
            say(f"{title:<38} {tokens}  {targets}  {gradient}")
    by_pack = {packer.pack: name for name, packer in reversed(packers.items())}
    timed = {name: packer for name, packer in packers.items() if by_pack[packer.pack] == name}
    batches = {}
    for title, paths in loads().items():
        batch = batches[title] = measure(timed, paths, rounds)
        say(f"\n{title + ', ' + str(batch['nodes']):<39} tokens  key rows  query rows  pairs  time")
        for name, row in batch["packers"].items():
            values = [row[key] for key in ("tokens", "key_rows", "query_rows", "pairs", "time")]
            say("{:<39} {:6.2f} {:9.2f} {:11.2f} {:6.2f} {:5.2f}".format(name, *values))
    return {"cases": cases, "batches": batches}
