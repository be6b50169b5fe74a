"""coppice dev replicate on hand-written run folders: known answers, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from coppice.research import replication
from coppice.research.replication import StudyCurve, curve, interval, main, slug, table
from coppice.research.studies import STUDIES
from coppice.tools.launching.config import load
from tests.tools.said import Said


def evaluation(
    version: int, steps: float, tokens: float, value: float, continued: float | None = None
) -> dict[str, float]:
    """A held-out record. continued: continuation steps, where the run had some."""
    counts = {"count/environment_steps": steps, "count/generated_tokens": tokens}
    counts |= {} if continued is None else {"count/continuation_steps": continued}
    return {"version": version, "heldout/return": value, "heldout/return_half": 0.1} | counts


def folder(run: Path, records: list[dict[str, float]], finished: bool = True) -> Path:
    """A run folder; each update is recorded a little before its evaluation."""
    run.mkdir(parents=True)
    lines = []
    for record in records:
        update = {key: n for key, n in record.items() if not key.startswith("heldout/")}
        update |= {key: max(0.0, n - 2) for key, n in update.items() if key.startswith("count/")}
        lines += [json.dumps(update), json.dumps(record)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if finished:
        (run / "summary.json").write_text("{}")
        (run / "cpu_seconds").write_text("7.5\n4.5\n")
    return run


START = evaluation(0, 0, 0, -0.5)


def test_a_version_evaluated_twice_counts_once_as_it_was_last(tmp_path: Path) -> None:
    twice = [evaluation(16, 190, 600, 0.5), evaluation(16, 200, 700, 0.75)]
    run = folder(tmp_path / "run", [START, evaluation(8, 100, 300, 0.25, 40), *twice])
    expected = StudyCurve([0, 8, 16], [0, 140, 200], [0, 300, 700], [-0.5, 0.25, 0.75], 12)
    assert curve(run, "return") == expected


@pytest.mark.parametrize("continued", [None, 0.0])
def test_decreasing_steps_are_refused(tmp_path: Path, continued: float | None) -> None:
    later = [evaluation(8, 100, 300, 0, 7), evaluation(9, 106, 9, 0, continued)]
    run = folder(tmp_path / "run", [START, *later])
    with pytest.raises(ValueError, match=f"{run}.*decrease"):
        curve(run, "return")


def test_intervals_are_students() -> None:
    for values, mean, half in (
        ([0.0, 1.0], 0.5, 12.706 * 0.5),  # s / sqrt(2) = 1/2
        ([float(i) for i in range(10)], 4.5, 2.262 * 0.916667**0.5),  # s^2 = 9.1667, t(9) = 2.262
        ([2.0, 2.0, 2.0], 2.0, 0.0),
    ):
        assert interval(values) == (mean, pytest.approx(half, abs=1e-3))
    mean, half = interval([0.25])
    assert mean == 0.25 and half != half  # one seed has no interval


def test_the_table_compares_where_the_shortest_run_of_all_arms_ended() -> None:
    fast = [StudyCurve([0, 8], [0, 200], [0, 1000], [0.0, 1.0], 50)]
    fast += [StudyCurve([0, 8], [0, 300], [0, 2000], [0.2, 0.8], 70)]
    slow = [StudyCurve([0, 4], [0, 100], [0, 4000], [0.0, 0.4])]
    lines = table({"fast": fast, "slow": slow}, "return").splitlines()
    assert lines[0].startswith("Held-out return")
    # Over 4 updates 0.25 and 0.35, at 4 updates 0.5 twice, at 100 steps 0.5 and 0.4, at 1,000
    # tokens 1 and 0.5: s / sqrt(2) is half the difference, t(1) = 12.706.
    at = "0.300 ±0.635 | 0.500 ±0.000 | 0.450 ±0.635 | 0.750 ±3.176 | 0.900 ±1.271"
    assert lines[4] == f"| fast | 2 | 0.100 ±1.271 | {at} | 250 | 1,500 | 60 |"
    numbers = "0.000 | 0.200 | 0.400 | 0.400 | 0.100 | 0.400 | 100 | 4,000"
    assert lines[5] == f"| slow | 1 | {numbers} | not counted |"


def curves_to(*ends: float) -> list[StudyCurve]:
    return [StudyCurve([0, 4, 8], [0, 50, 100], [0, 500, 1000], [0.0, 0.0, end]) for end in ends]


def test_differences_have_welchs_interval_and_holms_p() -> None:
    arms = {"one": curves_to(1, 2, 3), "two": curves_to(1, 2, 6)}
    lines = replication.against(arms).splitlines()
    # Means 2 and 3, variances 1 and 7: t = -1 / sqrt(8 / 3) = -0.6124 with (8/3)^2 / ((1/9 + 49/9)
    # / 2) = 2.56 degrees of freedom; three alike cells are corrected to p = 1.
    assert lines[2] == "| two | 8 updates | -1.000 ±5.741 | 1 |"
    # differences 0, 0, -3: mean -1, standard error 1, t(2) = 4.3027
    assert "-1.000 ±4.303" in replication.against(arms, pairs=True).splitlines()[2]
    assert replication.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_the_tokens_to_a_level_count_runs_that_never_reach_it() -> None:
    data = {"one": curves_to(1, 1, 0.5), "two": curves_to(0.4, 0.1, 1), "three": curves_to(0, 0, 0)}
    lines = replication.to_level(data, 0.5).splitlines()
    # 0.5 of the way from 500 to 1,000 tokens twice and all of it once; the median is the second
    assert lines[2] == "| one | 3 of 3 | 750 |  |"
    assert lines[3].startswith("| two | 1 of 3 | not reached | 0.")
    assert lines[4].startswith("| three | 0 of 3 | not reached | 0.")


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two finished seeds of one arm and one of another, which has an unfinished second one."""
    monkeypatch.setattr(replication, "RECORDS", tmp_path / "records")
    out = tmp_path / "study"
    for seed in (0, 1):
        start, end = evaluation(0, 0, 0, 0.1 * seed), evaluation(40, 1000, 5000, 0.5 + 0.1 * seed)
        folder(out / slug("VPR") / f"seed{seed}", [start, end])
        start, end = evaluation(0, 0, 0, 0, 0), evaluation(24, 500, 9000, 0.25, 1500)
        folder(out / slug("MC-PR") / f"seed{seed}", [start, end], finished=seed == 0)
    return out


def test_a_report_is_of_the_finished_runs(study: Path, said: Said) -> None:
    told = said(main, "vpr-tictactoe", "--out", study, "--report")
    report = (study / "return.md").read_text()
    assert report.strip() in told
    _, vpr, mc_pr = (line for line in report.splitlines() if line.startswith("| "))
    assert vpr.startswith("| VPR | 2 | 0.050 ±0.635 | 0.200 ±0.635 | 0.350 ±0.635 |")
    assert mc_pr.startswith("| MC-PR |") and mc_pr.endswith("| 0.250 | 2,000 | 9,000 | 12 |")
    assert "MC-PR" in (study / "return.svg").read_text()


def test_a_change_does_not_stand_on_kept_runs(study: Path, said: Said, refused: Said) -> None:
    said(main, "vpr-tictactoe", "--out", study, "--report")
    command = "vpr-tictactoe", "--out", study, "--only", "VPR", "--set", "scheduler.updates=2"
    assert "--set: study has kept records" in refused(main, *command)


def test_an_arm_without_runs_is_refused(study: Path, refused: Said) -> None:
    told = refused(main, "vpr-tictactoe", "--out", study, "--report", "--only", "VRP")
    assert all(repr(arm) in told for arm in ("VRP", *STUDIES["vpr-tictactoe"].arms))
    assert not (study / "return.md").exists()


def test_a_kept_run_is_reported_and_not_run_again(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "RECORDS", tmp_path / "records")
    parts = {f"heldout/{part}{end}": 0.5 for part in STUDIES["bfcl"].parts for end in ("", "_half")}
    records = [START | parts, evaluation(10, 100, 5000, 0.25) | parts]
    run = folder(tmp_path / "bfcl" / "vpr" / "seed0", records)
    words = "bfcl", "--out", tmp_path / "bfcl", "--seeds", 1, "--only", "VPR"
    told = said(main, *words, "--report")
    shutil.rmtree(run)
    assert said(main, *words) == told
    assert "| 0.250 | 100 | 5,000 | 12 |" in told and "| VPR | 0.500 ±0.500 |" in told


@pytest.mark.parametrize("name", STUDIES)
def test_the_arms_of_a_study_load_and_have_folders_of_their_own(name: str) -> None:
    arms = STUDIES[name].arms
    assert len({slug(arm) for arm in arms}) == len(arms)
    for arm in arms.values():
        load(replication.ROOT / "configs" / f"{arm.config}.toml", [*arm.changes, "seed=1"])


def test_each_seed_may_have_its_own_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heldout.jsonl").write_text("".join(f"{n}\n" for n in range(500)))
    monkeypatch.setattr(replication, "ensure_facts", lambda _: tmp_path)
    (lake, *_), (slate, *_) = (STUDIES[n].arms.values() for n in ("lake-starts", "slate-starts"))
    assert replication.own_start(tmp_path, lake, 3) == ["warm_start.seed=4"]
    drawn = set[str]()
    for seed in (3, 4):
        start, heldout = replication.own_start(tmp_path, slate, seed)
        assert start == f"warm_start.seed={seed + 1}"
        drawn |= set(own := Path(heldout.removeprefix("data.heldout=")).read_text().split())
        assert len(own) == 128
    assert len(drawn) > 128
