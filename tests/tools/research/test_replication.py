"""coppice dev replicate on hand-written run folders: known answers of curves, intervals and tables;
reports; what is refused."""

import json
from pathlib import Path

import pytest

from coppice.research.replication import STUDIES, StudyCurve, at, curve, interval, main, slug, table


def evaluation(
    version: int, steps: float, tokens: float, value: float, aside: float | None = None
) -> dict[str, float]:
    """A held-out record. aside: continuation steps, where the run had some."""
    made = {"version": version, "count/environment_steps": steps, "count/generated_tokens": tokens}
    made |= {"heldout/return": value, "heldout/return_half": 0.1}
    return made | ({} if aside is None else {"count/continuation_steps": aside})


def folder(run: Path, records: list[dict[str, float]], finished: bool = True) -> Path:
    """A run folder; each update is recorded a little before its evaluation."""
    run.mkdir(parents=True)
    lines = []
    for record in records:
        update = {
            key: max(0.0, n - 2) if key.startswith("count/") else n for key, n in record.items()
        }
        update = {key: n for key, n in update.items() if not key.startswith("heldout/")}
        lines += [json.dumps(update), json.dumps(record)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if finished:
        (run / "summary.json").write_text("{}")
        (run / "cpu_seconds").write_text("7.5\n4.5\n")
    return run


def test_a_curve_holds_the_evaluations_only_by_environment_and_continuation_steps(
    tmp_path: Path,
) -> None:
    run = folder(
        tmp_path / "run",
        [
            evaluation(0, 0, 0, -0.5, 0),
            evaluation(8, 100, 300, 0.25, 40),
            evaluation(9, 150, 500, 1),
        ],
    )
    assert curve(run, "return") == StudyCurve(
        [0, 8, 9], [0, 140, 150], [0, 300, 500], [-0.5, 0.25, 1], 12
    )


def test_a_version_evaluated_twice_counts_once_as_it_was_last(tmp_path: Path) -> None:
    """A run that crashed after an evaluation makes it again when it is resumed."""
    twice = [
        evaluation(8, 100, 300, 0.25),
        evaluation(16, 190, 600, 0.5),
        evaluation(16, 200, 700, 0.75),
    ]
    run = folder(tmp_path / "run", [evaluation(0, 0, 0, -0.5), *twice])
    assert curve(run, "return") == StudyCurve(
        [0, 8, 16], [0, 100, 200], [0, 300, 700], [-0.5, 0.25, 0.75], 12
    )


@pytest.mark.parametrize("aside", [None, 0.0])
def test_steps_that_decrease_are_refused_with_the_folder(
    tmp_path: Path, aside: float | None
) -> None:
    run = folder(
        tmp_path / "run",
        [evaluation(0, 0, 0, 0), evaluation(8, 100, 300, 0, 7), evaluation(9, 106, 9, 0, aside)],
    )
    with pytest.raises(ValueError, match=f"{run}.*decrease"):
        curve(run, "return")


def test_an_evaluation_recorded_without_counts_has_those_of_its_update(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [evaluation(0, 0, 0, -0.5), evaluation(8, 100, 300, 0.25, 40)])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps({"version": 8, "heldout/return": 0.25})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert curve(run, "return") == StudyCurve([0, 8], [0, 98 + 38], [0, 298], [-0.5, 0.25], 12)


def test_a_measure_that_was_never_evaluated_is_refused_with_the_folder(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [evaluation(0, 0, 0, 1)])
    with pytest.raises(ValueError, match=f"{run} has no held-out 'success'"):
        curve(run, "success")


def test_intervals_are_students() -> None:
    mean, half = interval([0.0, 1.0])
    assert (mean, half) == (0.5, pytest.approx(12.706 * 0.5, abs=1e-3))  # s / sqrt(2) = 1/2
    # 1, 2, 3, 4, 5: s^2 = 2.5, t(4) = 2.776
    assert interval([5.0, 1.0, 4.0, 2.0, 3.0]) == (3.0, pytest.approx(2.776 * 0.5**0.5, abs=1e-3))
    # 0 to 9: s^2 = 9.1667, t(9) = 2.262
    assert interval([float(i) for i in range(10)])[1] == pytest.approx(
        2.262 * 0.916667**0.5, abs=1e-3
    )
    assert interval([2.0, 2.0, 2.0]) == (2.0, 0.0)


def test_one_seed_has_a_mean_and_no_interval() -> None:
    mean, half = interval([0.25])
    assert mean == 0.25
    assert half != half


def test_between_evaluations_the_measure_is_on_the_line() -> None:
    made = StudyCurve([0, 8, 16], [0, 100, 300], [0, 1000, 1500], [0.0, 0.5, 1.0])
    assert at(made, made.steps, 50) == pytest.approx(0.25)
    assert at(made, made.steps, 150) == pytest.approx(0.625)
    assert at(made, made.tokens, 1250) == pytest.approx(0.75)
    assert at(made, made.steps, 300) == 1.0


def test_the_table_compares_where_the_shortest_run_of_all_arms_ended() -> None:
    fast = [
        StudyCurve([0, 8], [0, 200], [0, 1000], [0.0, 1.0], 50),
        StudyCurve([0, 8], [0, 300], [0, 2000], [0.2, 0.8], 70),
    ]
    slow = [StudyCurve([0, 4], [0, 100], [0, 4000], [0.0, 0.4])]
    lines = table({"fast": fast, "slow": slow}, "return").splitlines()
    assert lines[0].startswith("Held-out return")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert rows[0] == [
        "arm",
        "seeds",
        "start",
        "at 4 updates",
        "at 100 steps",
        "at 1,000 tokens",
        "end",
        "steps",
        "tokens",
        "CPU seconds",
    ]
    # At 4 updates 0.5 twice, at 100 steps 0.5 and 0.4, at 1,000 tokens 1 and 0.5: s / sqrt(2) is
    # half the difference, t(1) = 12.706.
    assert rows[2] == [
        "fast",
        "2",
        "0.100 ±1.271",
        "0.500 ±0.000",
        "0.450 ±0.635",
        "0.750 ±3.176",
        "0.900 ±1.271",
        "250",
        "1,500",
        "60",
    ]
    assert rows[3] == [
        "slow",
        "1",
        "0.000",
        "0.400",
        "0.400",
        "0.100",
        "0.400",
        "100",
        "4,000",
        "not counted",
    ]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two finished seeds of one arm and one of another, which has an unfinished second one."""
    out = tmp_path / "study"
    for seed in (0, 1):
        start, end = evaluation(0, 0, 0, 0.1 * seed), evaluation(40, 1000, 5000, 0.5 + 0.1 * seed)
        folder(out / slug("VPR") / f"seed{seed}", [start, end])
        start, end = evaluation(0, 0, 0, 0, 0), evaluation(24, 500, 9000, 0.25, 1500)
        folder(out / slug("MC-PR") / f"seed{seed}", [start, end], finished=seed == 0)
    return out


def test_a_report_is_made_of_the_finished_runs_there_are(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vpr-tictactoe", "--out", str(study), "--report"]) == 0
    report = (study / "return.md").read_text()
    assert report.strip() in capsys.readouterr().out
    assert "at 1,000 steps" in report
    rows = {
        line.split("|")[1].strip(): line for line in report.splitlines() if line.startswith("| ")
    }
    assert set(rows) == {"arm", "VPR", "MC-PR"}
    assert rows["VPR"].startswith(
        "| VPR | 2 | 0.050 ±0.635 | 0.350 ±0.635 | 0.550 ±0.635 | 0.550 ±0.635 |"
    )
    assert rows["MC-PR"].endswith("| 0.250 | 2,000 | 9,000 | 12 |")
    drawn = (study / "return.svg").read_text()
    assert "<svg" in drawn
    assert "MC-PR" in drawn


def test_a_report_of_some_arms_and_seeds(study: Path) -> None:
    assert (
        main(["vpr-tictactoe", "--out", str(study), "--report", "--only", "VPR", "--seeds", "1"])
        == 0
    )
    assert (
        "| VPR | 1 | 0.000 | 0.500 | 0.500 | 0.500 | 0.500 | 1,000 | 5,000 | 12 |"
        in (study / "return.md").read_text()
    )
    assert "MC-PR" not in (study / "return.md").read_text()


def test_another_measure_has_a_report_of_its_own(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["vpr-tictactoe", "--out", str(study), "--report", "--measure"]
    assert main([*given, "return_half"]) == 0
    assert "| VPR | 2 | 0.100 ±0.000 |" in (study / "return_half.md").read_text()
    assert (study / "return_half.svg").exists()
    assert main([*given, "sucess"]) == 2
    assert "no held-out 'sucess'" in capsys.readouterr().err


def test_a_folder_whose_steps_decrease_makes_no_report(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = folder(study / slug("OR") / "seed0", [evaluation(0, 90, 0, 0), evaluation(8, 10, 300, 0)])
    assert main(["vpr-tictactoe", "--out", str(study), "--report"]) == 2
    assert str(bad) in capsys.readouterr().err
    assert not (study / "return.md").exists()


def test_an_unknown_arm_is_refused_with_the_known_ones(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vpr-tictactoe", "--out", str(study), "--report", "--only", "VRP"]) == 2
    said = capsys.readouterr().err
    assert "'VRP'" in said
    assert all(repr(arm) in said for arm in STUDIES["vpr-tictactoe"].arms)
    assert not (study / "return.md").exists()


def test_a_folder_without_finished_runs_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vpr-tictactoe", "--out", str(tmp_path), "--report"]) == 2
    assert f"no finished run in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_the_arms_of_a_study_have_folders_of_their_own(name: str) -> None:
    arms = STUDIES[name].arms
    assert len({slug(arm) for arm in arms}) == len(arms)
