"""The self-check refuses every planted fault of packing and no healthy forest, in either number
type."""

from pathlib import Path

import pytest

from coppice.learner.forest.selfcheck import check
from tests.learner.forests import forest
from tests.learner.planted import FAULTS, refused
from tests.updates import trainer

TYPES = ["float32", "bfloat16"]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_each_planted_fault_is_refused_and_the_healthy_forest_is_not(
    tmp_path: Path, llama: Path, dtype: str, rank: int
) -> None:
    made = trainer(llama, tmp_path, rank, dtype=dtype)
    found = refused(made, forest(3))
    assert found.pop("") == ""
    assert set(found) == set(FAULTS)
    assert all("in float32" in sentence for sentence in found.values()), found
    assert all(p.grad is None for p in made.policy.trained().values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_200_healthy_forests_are_never_refused(tmp_path: Path, llama: Path, dtype: str) -> None:
    made = trainer(llama, tmp_path, dtype=dtype)
    assert all(
        check(made.policy, forest(seed, trees=1 + seed % 2, steps=1 + seed % 3))
        for seed in range(200)
    )
