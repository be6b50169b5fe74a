"""Counts of work survive the process that counted them."""

from pathlib import Path

from scheduler.metrics import Metrics


def test_counts_go_on_from_the_newest_record_of_the_run_before(tmp_path: Path) -> None:
    first = Metrics(tmp_path)
    assert first.last(["environment_steps"]) == {"environment_steps": 0}
    first.record(1, {"count/environment_steps": 10.0, "count/generated_tokens": 30.0}, show=False)
    first.record(2, {"count/environment_steps": 25.0}, show=False)
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"version": 3, "count/environment_st')  # cut off by a crash
    again = Metrics(tmp_path)
    assert again.last(["environment_steps", "generated_tokens", "other"]) == {
        "environment_steps": 25,
        "generated_tokens": 30,
        "other": 0,
    }
    again.record(3, {"count/environment_steps": 40.0}, show=False)
    again.close()
    assert Metrics(tmp_path).last(["environment_steps"]) == {"environment_steps": 40}
