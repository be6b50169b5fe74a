"""The engine benchmarks on a tiny model: what they count is what the shape of the trees implies."""

from pathlib import Path

import pytest

from coppice.research import benches
from coppice.research.benches import decode, prefill, weight_update
from coppice.research.benches.prefill import SHAPE
from tests.tools.said import Patch


def test_prefill_is_ideal_by_a_count_the_engine_has_no_part_in(llama: Path) -> None:
    row = prefill.run(str(llama))
    # A child adds its observation and the last token of the action, which was sampled but never
    # forwarded.
    of_tree = SHAPE.question + (SHAPE.steps - 1) * (SHAPE.observation + 1)
    expected = SHAPE.instruction + SHAPE.questions * of_tree
    assert row["prefilled_tokens"] == row["ideal_prefill_tokens"] == expected
    assert row["ratio"] <= row["goal"]


def test_decode_compares_both_sides_in_every_cell(llama: Path, monkeypatch: Patch) -> None:
    for name, value in {"NEW": 6, "ROUNDS": 1, "PREFILL": {"short": (3, 20)}}.items():
        monkeypatch.setattr(decode, name, value)
    row = decode.run(str(llama), peer="generate")
    assert len(row["ratios"]) == 2 * 3
    assert all(len(c["ours"]) == len(c["generate"]) == 1 for c in row["tokens_s"].values())
    assert row["ratio"] == min(row["ratios"].values()) > 0


def test_a_load_beside_samples_is_measured(llama: Path) -> None:
    row = weight_update.run(str(llama))
    assert all(row[kind]["pause_s"] > 0 for kind in ("adapter", "whole"))
    assert row["whole"]["mb"] > row["adapter"]["mb"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prefil"], "unknown ['prefil']"),
        (["prefill", "--set", "modle=x"], "['modle'] unknown to benchmark prefill, which takes ['"),
        (["memory", "--set", "actors=0"], "actors = 0: expected a whole number, at least 1"),
    ],
)
def test_an_unknown_benchmark_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benches.main(words) == 2
    assert said in capsys.readouterr().err
