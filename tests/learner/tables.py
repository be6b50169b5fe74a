"""Tables of turns for the tests of schemes, weights and watch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coppice.learner import schemes
from coppice.learner.forest.trees import Path
from coppice.learner.update.table import TurnTable
from coppice.learner.update.targets import Advantages

NO = np.nan


def acted(
    prefix: Sequence[int] | np.ndarray, action: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray | None = None, sampled: Sequence[bool] | None = None,
) -> Path:  # fmt: skip
    """The path of one turn, all of whose tokens were sampled by version 0 unless said otherwise."""
    n = len(action)
    return Path(
        np.concatenate([prefix, action]).astype(np.int64), len(prefix),
        logprobs=np.zeros(n, np.float32) if logprobs is None else np.array(logprobs, np.float32),
        versions=np.zeros(n, np.int32),
        sampled=np.ones(n, bool) if sampled is None else np.array(sampled),
    )  # fmt: skip


def estimated(table: TurnTable, scheme: str, **options: Any) -> Advantages:
    """What an update makes of a table: turns on which the scheme does not train get 0."""
    loaded = schemes.load(scheme, options)
    kept = loaded.trains(table)
    tokens = table.per_token(kept)

    def placed(values: np.ndarray) -> np.ndarray:
        whole = np.zeros(len(tokens), values.dtype)
        whole[tokens] = values
        return whole

    if not kept.any():
        return Advantages(np.zeros(len(tokens)))
    made = loaded(table.only(kept))
    returns, trained = (
        None if part is None else placed(part) for part in (made.returns, made.trained)
    )
    return Advantages(placed(made.advantages), returns, trained)


def made_of(
    lengths: list[int], scores: dict[str, list[float]], tree: list[int] | None = None,
    tokens: list[int] | None = None, sampled: list[bool] | None = None,
    token_scores: dict[str, list[float]] | None = None, anchor: list[int] | None = None,
) -> TurnTable:  # fmt: skip
    """Whole trajectories. lengths, tree: [trajectories]; scores, tokens, anchor: [turns]."""
    trees = np.repeat(tree or [0] * len(lengths), lengths)
    columns, token_columns = (
        {name: np.array(column, np.float64) for name, column in some.items()}
        for some in (scores, token_scores or {})
    )
    return TurnTable(
        trees, trees, np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(1, n + 1) for n in lengths]),
        np.array(tokens or [1] * sum(lengths)), columns,
        None if anchor is None else np.array(anchor),
        None if sampled is None else np.array(sampled), token_columns,
    )  # fmt: skip


def random_table(seed: int) -> TurnTable:
    """One to three questions of one to four trajectories of up to four turns, with every column."""
    rng = np.random.default_rng(seed)
    tree = np.repeat(np.arange(3), rng.integers(1, 5, 3))[: rng.integers(2, 12)]
    lengths = rng.integers(1, 5, len(tree))
    ends = np.cumsum(lengths) - 1
    n = int(lengths.sum())
    tokens = rng.integers(1, 4, n)
    total = int(tokens.sum())
    score = np.full(n, NO)
    score[ends] = rng.integers(0, 2, len(ends))
    process = rng.integers(0, 7, n) / 6
    process[ends] = NO
    process[rng.random(n) < 0.2] = NO
    columns = {
        "outcome": score.tolist(), "process": process.tolist(),
        "reward": rng.normal(0, 1, n).tolist(), "mc_value": rng.random(n).tolist(),
        "valid": rng.integers(0, 2, n).tolist(),
    }  # fmt: skip
    columns["step_reward"] = columns["reward"]
    models = {
        name: rng.normal(0, 1, total).tolist() for name in ("prm", "value", "kl", "log_ratio")
    }
    return made_of(
        lengths.tolist(), columns, tree.tolist(), tokens.tolist(),
        (rng.random(total) < 0.8).tolist(), models, rng.integers(0, 3, n).tolist(),
    )  # fmt: skip
