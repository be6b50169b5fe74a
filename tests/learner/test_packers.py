"""Our packer through the suite for tree packers, and packers whose faults the suite must see."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coppice.research import packers
from coppice.research.packers import BOUND, CASES, ours


def changed(**functions: Any) -> Any:
    return SimpleNamespace(**{**vars(ours), **functions})


@pytest.mark.parametrize("title", CASES)
def test_our_forest_holds_each_trie_once_and_trains_as_path_by_path(title: str) -> None:
    case = CASES[title]
    row = packers.check(ours, case)
    assert row["gradient"] < BOUND
    assert packers.unique(case.paths)[0] == row["tokens"] == row["key_rows"] == case.unique
    assert (row["targets"], row["weight"]) == (case.targets, 1.0)


def test_the_suite_sees_lost_first_tokens_lost_duplicates_and_leaking_branches() -> None:
    def later(causal: Any, packed: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, logprobs = ours.logprobs(causal, packed)
        return weights[1:], logprobs[1:]

    row = packers.check(changed(logprobs=later), CASES["group"])
    assert (row["targets"], row["of_targets"]) == (5, 6)
    assert row["gradient"] > BOUND
    merged = changed(prepare=lambda paths: ours.prepare(paths[1:]))
    assert packers.check(merged, CASES["duplicates"])["weight"] == 0.0
    for title in ("group", "recurrent layers"):
        chain = changed(attention="sdpa")
        assert packers.check(chain, CASES[title])["gradient"] > BOUND
    raising = changed(pack=lambda batch: batch["prompts"])
    assert "raised TypeError" in packers.check(raising, CASES["group"])["reason"]
