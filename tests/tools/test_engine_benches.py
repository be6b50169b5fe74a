"""The engine benchmarks on a tiny model: what they count is what the shape of the trees implies."""

from pathlib import Path

from tools.benches import prefill, rollout_speed
from tools.benches.slate_shape import INSTRUCTION, OBSERVATION, QUESTION, QUESTIONS, STEPS


def test_prefill_is_ideal_by_a_count_the_engine_has_no_part_in(llama: Path) -> None:
    row = prefill.run(str(llama))
    # A child adds its observation and the last token of the action, which was sampled but never forwarded.
    expected = INSTRUCTION + QUESTIONS * (QUESTION + (STEPS - 1) * (OBSERVATION + 1))
    assert row["prefilled_tokens"] == row["ideal_prefill_tokens"] == expected
    assert row["ratio"] <= row["goal"]


def test_rollout_speed_measures_both_sides_in_every_round(llama: Path) -> None:
    row = rollout_speed.run(str(llama))
    assert len(row["ours_tokens_s"]) == len(row["generate_tokens_s"]) == rollout_speed.ROUNDS
    assert min(row["ours_tokens_s"] + row["generate_tokens_s"]) > 0
    assert row["better"] == "higher"
