"""The forest of a batch, how it is cut into micro-batches for the ranks, and the self-check, which
refuses every planted fault of packing and no healthy forest."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.learner.forest.selfcheck import check
from coppice.learner.forest.trees import Path, Trie, cuts, micro_batches, pack
from coppice.learner.update.passes import plan
from tests.learner.conftest import Make
from tests.learner.forests import forest, random_paths
from tests.learner.planted import FAULTS, refused


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_a_forest_holds_each_prefix_once_and_exact_ancestry(paths: list[list[int]]) -> None:
    made = pack([Path(p, 1) for p in paths])
    distinct = {tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)}
    assert len(made.tokens) == len(distinct)
    position = 0
    for path in paths:
        reads = made.read[position : position + len(path) - 1]
        position += len(path) - 1
        for depth, (node, token) in enumerate(zip(reads, path, strict=False)):
            assert made.depth[node] == depth
            assert made.tokens[node] == token
            ancestors = [k for k in range(len(made.tokens)) if k <= node < made.end[k]]
            assert made.tokens[ancestors].tolist() == path[: depth + 1]
    assert made.target.tolist() == [t for p in paths for t in p[1:]]


@given(random_paths, st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_micro_batches_keep_every_path_and_the_budget(tokens: list[list[int]], budget: int) -> None:
    paths = [Path(t, 1) for t in tokens]
    where = cuts(paths)
    assert sum(where.added) == pack(paths).nodes
    batches, sizes = micro_batches(where, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(paths)))
    for batch, size in zip(batches, sizes, strict=True):
        assert size == pack([paths[i] for i in batch]).nodes
        assert size <= budget or len(batch) == 1


@pytest.mark.parametrize("computing", [4, 2])
def test_ranks_share_eight_questions_nearly_evenly(computing: int) -> None:
    class Four:
        rank, count, sharded = 0, 4, False

    Four.computing = computing  # pyright: ignore
    paths = [p for seed in range(8) for p in forest(seed, trees=1, steps=3)]
    plans = []
    for rank in range(4):
        Four.rank = rank
        plans.append(plan(Trie(paths), range(len(paths)), 10_000, Four()))  # pyright: ignore
    loads = [sum(pack([paths[i] for i in rows]).nodes for rows, _ in made.mine) for made in plans]
    assert sum(loads) == plans[0].forwarded
    assert max(loads) <= 1.25 * plans[0].whole / computing
    assert loads[computing:] == [0] * (4 - computing)


@given(random_paths, st.data())
@settings(deadline=None, max_examples=60)
def test_a_part_of_the_trie_is_a_whole_forest(tokens: list[list[int]], data: st.DataObject) -> None:
    paths = [Path(t, 1) for t in tokens]
    rows = data.draw(st.lists(st.integers(0, len(paths) - 1), min_size=1, unique=True))
    trie, alone = Trie(paths), [paths[i] for i in rows]
    for shared in (True, False):
        part, expected = trie.forest(rows, shared), pack(alone, shared)
        for field in ("tokens", "depth", "end", "read", "target"):
            np.testing.assert_array_equal(getattr(part, field), getattr(expected, field))
        assert (part.path_tokens, part.nodes) == (expected.path_tokens, expected.nodes)
    own, among = trie.cuts(rows), cuts(alone)
    assert sorted(zip(own.length, own.added, strict=True)) == sorted(
        zip(among.length, among.added, strict=True)
    )


TYPES = ["float32", "bfloat16"]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_each_planted_fault_is_refused_and_the_healthy_forest_is_not(
    make: Make, dtype: str, rank: int
) -> None:
    made = make(rank, dtype=dtype)
    found = refused(made, forest(3))
    assert found.pop("") == ""
    assert set(found) == set(FAULTS)
    assert all("in float32" in sentence for sentence in found.values()), found
    assert all(p.grad is None for p in made.policy.trained().values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_200_healthy_forests_are_accepted(make: Make, dtype: str) -> None:
    made = make(dtype=dtype)
    assert all(
        check(made.policy, forest(seed, trees=1 + seed % 2, steps=1 + seed % 3))
        for seed in range(200)
    )
