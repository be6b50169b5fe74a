"""The verdict on a run, from folders that the run's own classes have written."""

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coppice.common.shards import Shard
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import report
from coppice.scheduler.telemetry.verdict import Statement, lines, verdict
from coppice.tools.inspecting import frames, runs
from tests.run_folder import make


def told(run: Path) -> dict[str, Statement]:
    """What is said of a run, by subject."""
    of = runs.read(run)
    statements = verdict(of.records, of.evaluations, of.config, frames.opened(run))
    return {one.subject: one for one in statements}


def test_the_verdict_counts_what_the_journal_holds(tmp_path: Path) -> None:
    rewards = [0.5, 0.0, 0.5, 0.0, 0.5, 0.5, 0.5, 0.0, 0.5, 0.0, 0.5, 0.5]
    run = make(tmp_path / "run", rewards)
    said = told(run)
    groups = frames.sql(run, "SELECT spread, texts FROM groups")
    equal = groups.filter(groups["spread"] == 0)
    share = f"{len(equal) / len(groups):.0%} of {len(groups)} groups had equal rewards"
    one_text = f"one text in {(equal['texts'] == 1).mean():.0%}"
    assert said["spread"].words == f"{share}, 0% at last; {one_text}"
    ends = frames.sql(run, "SELECT outcome, AVG(reward) AS pay FROM turns GROUP BY outcome")
    pay = dict(ends.rows())
    assert said["judge"].words.startswith(f"right ends earn {pay[1]:+.2f}, wrong {pay[0]:+.2f} (")
    assert (
        said["learned"].words
        == "em 0.250 -> 0.750, +0.500 ±0.141: rose beyond the interval; 16 tasks"
    )
    assert "also" not in said  # f1 stayed


def test_evaluations_under_other_settings_are_not_compared(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with contextlib.closing(sqlite3.connect(run / "journal.sqlite")) as rows, rows:
        rows.execute(
            "UPDATE evaluations SET result=json_set(result, '$.how', 'other')"
            " WHERE version = (SELECT MAX(version) FROM evaluations)"
        )
    few = "unknown: 1 of the two held-out evaluations alike that it takes"
    assert told(run)["learned"].words == few


def test_the_closing_lines_count_the_trees_of_all_schedulers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run", ended=False, shard=Shard(0, 2))
    other = make(run / "shards" / "1", ended=False, shard=Shard(1, 2)) / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(other)) as rows, rows:
        rows.execute("UPDATE trees SET status='quarantined', reason='a judge failed'")
    journal = Journal(run / "journal.sqlite")
    report.write(run, journal, Counter(), Counter(), {"updates": 1.0})
    journal.close()
    assert "3 quarantined tasks" in capfd.readouterr().out


def test_a_judge_that_pays_wrong_ends_more_is_the_worst_of_all(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [-0.5, -0.25, 0.0] * 4)
    first, second, *_ = (*told(run).values(),)
    assert (first.subject, second.subject, second.weight) == ("learned", "judge", 1.0)
    listed = frames.sql(run, f"SELECT tree FROM turns WHERE {second.trees[9:-1]}")
    assert len(listed) == 12 - 4 + 4


def test_a_policy_that_does_not_move_gets_a_learning_rate(tmp_path: Path) -> None:
    gaps = {"watch/engine_gap_p99": 1e-6, "watch/engine_gap_mean": 1e-7}
    config = {"learner": {"lr": 1e-9}}
    for aged, rate in ((1e-6, "1e-05"), (1e-7, "1e-08")):  # the latter is noise
        records = [{"version": v, "watch/staleness_1/gap_mean": aged} for v in (1.0, 2.0)]
        (*_, numerics) = verdict([record | gaps for record in records], [], config, None)
        assert (numerics.weight, numerics.remedy) == (1.0, f"learner.lr={rate}")


def test_the_gap_is_compared_with_the_limit_of_the_learners_own_type() -> None:
    records = [{"version": 1.0, "watch/engine_gap_p99": 0.2, "watch/engine_gap_limit": 0.05}]
    (*_, numerics) = verdict(records, [], {"learner": {"dtype": "auto"}}, None)
    assert (numerics.weight, numerics.remedy) == (1.0, "learner.correction=tis")


def test_an_evaluation_without_its_headline_is_passed_over() -> None:
    def result(version: int, **means: float) -> dict[str, Any]:
        measures = {name: {"mean": mean, "half": 0.1} for name, mean in means.items()}
        return {"version": version, "headline": "em", "measures": measures, "questions": 4}

    evaluations = [result(0, em=0.1), result(5), result(10, em=0.9)]
    assert verdict([], evaluations, {}, None)[0].words.startswith("em 0.100 -> 0.900, +0.800")
    evaluations[-1] = result(10)
    assert verdict([], evaluations, {}, None)[0].words.startswith("unknown: 1 of the two")


def test_the_remedy_for_lost_episodes_is_that_of_the_heaviest_cause() -> None:
    counts = {"count/actions": 1600.0, "count/crashed_episodes": 160.0, "count/calls": 9.0}
    own = {"version": 1.0, "learner/questions": 200.0, "rollout/outcomes": 1440.0}
    given_back = {"version": 2.0, "learner/questions": 0.0}  # by a checkpoint, without counts
    (_, episodes, *_) = verdict([own | counts, given_back], [], {}, None)
    assert (round(episodes.weight, 3), episodes.subject) == (0.1, "episodes")
    assert episodes.remedy == "to mend the crashed episodes"


@pytest.mark.parametrize("changed", [{0: 0.25}, {0: 0.25, 3: 0.3}, {0: 0.25, 3: 0.15}, {}])
def test_a_change_within_its_interval_is_called_so(
    tmp_path: Path, changed: dict[int, float]
) -> None:
    words = told(make(tmp_path / "run", exact=changed))["learned"].words
    assert ("not beyond the interval" if len(changed) > 1 else "unknown: ") in words


def test_the_closing_summary_has_ten_lines_of_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "run", [-0.5, 0.0] * 6)
    own = [line for line in capsys.readouterr().out.splitlines() if line.startswith("<5>")]
    many = [
        Statement(f"s{i}", "word; " * 40 + "x" * 90, weight=i, trees="y" * 90) for i in range(12)
    ]
    wordy = lines(many, "RUN")
    for shown in ([line.removeprefix("<5>") for line in own[:-1]], wordy):
        assert 3 <= len(shown) <= 10
        assert max(map(len, shown)) <= 80
    assert own[0].startswith("<5>learned   em 0.250 -> 0.750")
