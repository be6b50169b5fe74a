"""coppice report on run folders that the run's own classes have written."""

import json
import math
import re
import sys
from pathlib import Path

import msgspec
import pytest

from coppice.scheduler.evaluation.evaluation import Estimate, HeldOut
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry.verdict import EQUAL_SHARE
from coppice.tools.inspecting import figures, report, runs
from coppice.tools.inspecting.report import Section, main
from coppice.tools.inspecting.runs import Curve
from tests.run_folder import make
from tests.tools.said import Said

pytestmark = pytest.mark.second


def page_of(tmp_path: Path, *arguments: object) -> str:
    out = tmp_path / "page.html"
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def parts(*folders: tuple[Path, str]) -> dict[str, Section]:
    known = runs.grouped([runs.read(folder, name) for folder, name in folders])
    return {part.title: part for part in report.sections(known)}


def rows(part: Section, caption: str) -> list[list[str]]:
    (table,) = (table for table in part.tables if table.caption.startswith(caption))
    return [table.head, *table.rows]


def captions(part: Section) -> dict[str, str]:
    return {drawn.title: drawn.caption for drawn in part.figures}


def test_a_page_has_every_section_with_what_the_run_recorded(tmp_path: Path) -> None:
    text = page_of(tmp_path, f"{make(tmp_path / 'a')}=base")
    assert re.search('aria-label="score/reward: [^"]+: -0.5 → 1"', text)
    assert not re.search(r"<script|(src|href)=\"(?!#|data:)", text)
    page = parts((tmp_path / "a", "base"))
    before, after = "0.250 ±0.100 (version 0)", "0.750 ±0.100 (version 3)"
    held_out = rows(page["Held-out results"], "Held-out measures")
    moved = "+0.500 ±0.141: rose beyond the interval"
    assert held_out[1] == ["base", "em", before, after, moved]
    assert held_out[2][-1].endswith(": not beyond the interval")
    assert captions(page["Other curves"])["share/staleness_1"] == "0.25 → 0.25"
    waited = rows(page["Who waited for whom"], "Each moment")
    assert waited[1] == ["rollouts: generate (decode)", "2.3 s (60.8%)"]
    python = ["environment.python", f'"{sys.version.split()[0]}"']
    assert python in rows(page["Settings and machine"], "Settings, machine")


def test_the_verdict_comes_first_and_its_links_lead_to_trees_of_the_page(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [-0.5, 0.0] * 6)
    page = parts((run, "a"))
    assert list(page)[:2] == ["Verdict", "What matters"]
    assert [part.folded for part in page.values()].index(True) == 2
    told = {one.subject: (one, links) for one, links in page["Verdict"].verdicts["a"]}
    links = [anchor for _, showing in told.values() for anchor in showing]
    assert set(links) == set(page["Trees that show it"].trees)
    assert next(iter(told["spread"][1].values())) == "What is the capital of country 11?"
    text = page_of(tmp_path, run)
    assert [anchor for anchor in links if f'<pre id="{anchor}"' not in text] == []
    # the plots: held out, then the first metric of each heavy statement, the heaviest first
    assert [*captions(page["What matters"])][:3] == ["heldout/em", "score/reward", EQUAL_SHARE]
    assert len(page["What matters"].figures) == 3  # the others are constant


def test_an_axis_ends_where_values_can() -> None:
    share = Curve([1.0, 2.0], [0.1, 0.99], [0.2, 0.2])
    (axis,) = figures.panels({"share": {"": share}}, "update").axes
    assert axis.get_ylim() == (0.0, 1.0)


def test_runs_of_one_name_become_a_mean_with_its_interval_over_seeds(tmp_path: Path) -> None:
    folders = [make(tmp_path / f"s{i}", [i, 9.0], {0: i / 10}) for i in (1, 2, 6)]
    # Student's t with two degrees of freedom; the values 1, 2, 6 have variance 7
    half = 4.303 * math.sqrt(7) / math.sqrt(3)
    longer = make(tmp_path / "longer", [1.0, 2.0, 3.0])
    group = [runs.read(folder) for folder in folders]
    curve = runs.curve(group, "score/reward")
    assert (curve.x, curve.y) == ([1.0, 2.0], [3.0, 9.0])
    assert curve.half == [pytest.approx(half), 0.0]
    assert runs.curve([*group, runs.read(longer)], "score/reward").x == [1.0, 2.0]
    page = parts(*((folder, "slate") for folder in folders), (make(tmp_path / "other"), "grpo"))
    assert captions(page["What matters"])["score/reward"].endswith(": slate: 3 → 9; grpo: -0.5 → 1")


def test_names_are_escaped(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    text = page_of(tmp_path, f"{run}=<b>$n_$</b>", f'{run}="><img src=x onerror=alert(2)>')
    assert "&lt;b&gt;$n_$&lt;/b&gt;" in text
    assert not re.search(r"<(script|b|img)\b", text)


def test_config_differences_are_exact(tmp_path: Path) -> None:
    first = make(tmp_path / "a", changes=["learner.lr=0.5", "seed=1"])
    seeds = [make(tmp_path / f"b{seed}", changes=[f"seed={seed}", "name=two"]) for seed in (2, 3)]
    page = parts((first, "a"), *((folder, "b") for folder in seeds))
    differ = rows(page["Settings and machine"], "What differs")
    assert [row[0] for row in differ] == ["key", "learner.lr", "name", "seed"]
    assert differ[-1] == ["seed", "1", "2, 3"]


def test_what_a_run_lacks_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    live = make(tmp_path / "live", ended=False, scores=False, exact={})
    with (live / "metrics.jsonl").open("a") as file:
        file.write('{"version": 9, "learner/sec')
    old = make(tmp_path / "old")
    lines = (old / "metrics.jsonl").read_bytes().splitlines()
    (old / "metrics.jsonl").write_bytes(b"\n".join([*lines[:-1], b"\xff\x00", b'{"version": 9']))
    (old / "environment.json").unlink()
    (old / "config.json").unlink()
    (old / "journal.sqlite").write_bytes(b"no database" * 99)
    for folder, sentences in (
        (live, "summary.json is missing, It has no held-out evaluation"),
        (
            old,
            "environment.json is missing, config.json is missing, Its journal cannot be read,"
            " metrics.jsonl has 2 damaged lines",
        ),
    ):
        page = parts((folder, folder.name))
        said = " ".join(text for part in page.values() for text in part.words)
        assert [sentence for sentence in sentences.split(", ") if sentence not in said] == []


def test_evaluations_under_other_settings_are_not_compared(tmp_path: Path) -> None:
    run = make(tmp_path / "a", exact={0: 0.25, 3: 0.75})
    journal = Journal(run / "journal.sqlite")
    held = HeldOut(5, 16, "em", {"em": Estimate(0.0, 0.1)}, how="temperature 1.5")
    journal.save_evaluation(5, "end", msgspec.to_builtins(held))
    journal.close()
    read = runs.read(run)
    assert [result["version"] for result in read.evaluations] == [5]
    assert "Of its evaluations 2 had other settings and are left out." in read.missing


def test_a_mark_of_a_node_that_is_gone_leaves_the_verdict(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [-0.5, 0.0] * 6)
    before = [one.subject for one, _ in parts((run, "a"))["Verdict"].verdicts["a"]]
    stale = {"tree": 1, "node": 999, "mark": "good", "task": "t"}
    (run / "marks.jsonl").write_text(json.dumps(stale))
    page = parts((run, "a"))["Verdict"]
    assert [one.subject for one, _ in page.verdicts["a"]] == before
    assert any("Its trees cannot be shown" in sentence for sentence in page.words)


def test_the_time_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    rows = [
        {"version": v, "time/run": s, "learner/groups": 1}
        for v, s in enumerate((30.0, 60.0, 20.0, 50.0), 1)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [record["time/run"] for record in runs.read(run).records] == [30, 60, 80, 110]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("/no/such", "/no/such is no run folder"),
        ("{run} --metric score/rewrd", "score/rewrd: no run has recorded it; there are count"),
        ("{run} --out x.pdf", "--out x.pdf: expected a name that ends with .html, .png, .svg"),
        ("{young} --out x.svg", "no update was made yet"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path: Path, said: Said, words: str, message: str) -> None:
    run, young = make(tmp_path / "a"), make(tmp_path / "young", rewards=[], ended=False)
    given = words.format(run=run, young=young).split()
    given += [] if "--out" in given else ["--out", str(tmp_path / "x.svg")]
    assert message in said(main, *given, status=2)


def test_a_smoothed_value_is_the_mean_of_its_neighbours() -> None:
    values = [
        float(i * i % 17) for i in range(100)
    ]  # two neighbours on each side, fewer at the ends
    around = [values[max(0, i - 2) : i + 3] for i in range(100)]
    assert figures.smooth(values) == pytest.approx([sum(near) / len(near) for near in around])
