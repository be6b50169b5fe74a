"""coppice report on run folders that the run's own classes have written."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from coppice.tools.bootstrap import ROOT
from coppice.tools.inspecting import runs, sections
from coppice.tools.inspecting.figures import smooth
from coppice.tools.inspecting.report import main
from tests.run_folder import make

SECTIONS = (
    "Runs", "Held-out results", "Learning", "Reward components", "Staleness", "Numerics watch", "Time", "Trees and rollouts",
    "Configuration", "Environment and versions",
)  # fmt: skip


def page_of(tmp_path: Path, *arguments: object) -> str:
    out = tmp_path / "page.html"
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def cells(text: str, caption: str) -> list[list[str]]:
    """The rows of the table with ``caption``."""
    table = text[text.index(f"<caption>{caption}") :].split("</table>")[0]
    return [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    ]


def test_a_page_has_every_section_with_what_the_run_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page_of(tmp_path, f"{make(tmp_path / 'a')}=base")
    assert re.findall(r'<h2 id="[^"]*">(.*?)</h2>', text) == list(SECTIONS)
    assert cells(text, "Held-out measures")[1:] == [
        [
            "base",
            "em",
            "0.250 ±0.100 (version 0)",
            "0.750 ±0.100 (version 3)",
            "rose beyond both intervals",
        ],
        [
            "base",
            "f1",
            "0.500 ±0.200 (version 0)",
            "0.500 ±0.200 (version 3)",
            "within the intervals",
        ],
    ]
    assert "| base | em | 0.250 ±0.100 (version 0) | 0.750" in capsys.readouterr().out
    assert 'aria-label="reward of the rollouts: -0.5 → 1"' in text
    assert 'aria-label="share of tokens 1 updates stale: 0.25 → 0.25"' in text
    assert "random_answer 0.125" in text
    assert ["learner: updates", "1.0 s (33.3%)"] in cells(text, "Seconds per process")
    assert ["candidates per tree", "2.00"] in cells(text, "Tree statistics")
    assert re.findall(r"base, (best|worst|most surprising): tree (\d)", text)[:2] == [
        ("best", "2"),
        ("best", "1"),
    ]
    assert "the same in" in text.lower()
    assert ["python", sys.version.split()[0]] in cells(text, "Machine and code")
    assert (
        "No run has recorded any of this." in text.split("Numerics watch</h2>")[1].split("<h2")[0]
    )


def test_the_time_budget_of_the_page_adds_up(tmp_path: Path) -> None:
    rows = dict(cells(page_of(tmp_path, make(tmp_path / "a")), "Who waited for whom")[1:])
    assert rows == {
        "rollouts: generate (decode)": "2.3 s (60.8%)", "rollouts: generate (prefill)": "0.7 s (19.2%)",
        "learner: updates, other work": "0.3 s (8.8%)", "learner: forward": "0.3 s (8.0%)", "learner: publishing weights": "0.1 s (3.2%)",
        "sum": "3.8 s",
    }  # fmt: skip


def test_runs_of_one_name_become_a_mean_with_its_interval_over_seeds(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / f"s{i}", [reward, 9.0], {0: exact})
        for i, (reward, exact) in enumerate([(1, 0.1), (2, 0.2), (6, 0.6)])
    ]
    half = (
        4.303 * math.sqrt(7) / math.sqrt(3)
    )  # Student's t with two degrees of freedom; the values 1, 2, 6 have variance 7
    group = [runs.read(folder) for folder in folders]
    curve = runs.curve(group, "score/reward")
    assert (curve.x, curve.y) == ([1.0, 2.0], [3.0, 9.0])
    assert curve.half == [pytest.approx(half), 0.0]
    assert runs.curve(group, "score/reward", "time/run").x == [0.0, 10.0]
    text = page_of(
        tmp_path, *(f"{folder}=slate" for folder in folders), f"{make(tmp_path / 'other')}=grpo"
    )
    assert ["slate", "em", f"0.300 ±{half / 10:.3f} (version 0)", "-", "-"] in cells(
        text, "Held-out measures"
    )
    assert 'aria-label="reward of the rollouts: slate: 3 → 9; grpo: -0.5 → 1"' in text
    assert cells(text, "Tree statistics")[0] == ["", "slate: s0", "slate: s1", "slate: s2", "grpo"]


def test_a_group_is_drawn_as_far_as_all_of_its_runs_have_come(tmp_path: Path) -> None:
    group = [
        runs.read(make(tmp_path / name, rewards))
        for name, rewards in (("a", [1, 2, 3]), ("b", [1, 2]))
    ]
    assert runs.curve(group, "score/reward").x == [1.0, 2.0]


def test_a_name_has_the_same_colour_where_another_run_has_no_points(tmp_path: Path) -> None:
    text = page_of(tmp_path, f"{make(tmp_path / 'a', scores=False)}=a", f"{make(tmp_path / 'b')}=b")
    reward = text[text.index('aria-label="reward of the rollouts: b: -0.5 → 1"') :].split("</svg>")[
        0
    ]
    assert "#d9752b" in reward
    assert "#3b82c4" not in reward
    assert "#3b82c4" in text


def test_texts_of_rollouts_names_and_tasks_are_escaped(tmp_path: Path) -> None:
    run = make(tmp_path / "a", text="<script>alert(1)</script> & $x_$ </pre>")
    text = page_of(tmp_path, f"{run}=<b>$n_$</b>", f'{run}="><img src=x onerror=alert(2)>')
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in text
    assert not re.search(r"<(script|b|img)\b", text)


def test_config_differences_are_exact(tmp_path: Path) -> None:
    first = make(tmp_path / "a", changes=["learner.lr=0.5", "seed=1"])
    seeds = [make(tmp_path / f"b{seed}", changes=[f"seed={seed}", "name=two"]) for seed in (2, 3)]
    text = page_of(tmp_path, f"{first}=a", *(f"{folder}=b" for folder in seeds))
    assert cells(text, "Keys whose values differ") == [
        ["key", "a", "b"],
        ["learner.lr", "0.5", "0.001"],
        ["name", "&#34;slate-tiny&#34;", "&#34;two&#34;"],
        ["seed", "1", "2, 3"],
    ]
    alone = page_of(tmp_path, f"{first}=a")
    assert cells(alone, "Keys whose values differ") == [
        ["key", "configs/slate-tiny.toml", "a"], ["learner.lr", "0.001", "0.5"], ["seed", "0", "1"],
    ]  # fmt: skip


def test_what_a_run_lacks_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    live = make(tmp_path / "live", ended=False, scores=False, exact={})
    with (live / "metrics.jsonl").open("a") as file:
        file.write('{"version": 9, "learner/sec')
    text = page_of(tmp_path, live)
    for sentence in (
        "summary.json is missing",
        "It has no held-out evaluation",
        "its trees have no scores",
    ):
        assert sentence in text
    assert 'aria-label="entropy (nats): 0.5 → 0.5"' in text
    assert "reward of the rollouts" not in text

    young = make(tmp_path / "young", rewards=[], exact={}, ended=False)
    assert "has made no update yet" in page_of(tmp_path, young)

    old = make(tmp_path / "old")
    (old / "environment.json").unlink()
    (old / "config.json").unlink()
    (old / "journal.sqlite").write_bytes(b"no database" * 99)
    lines = (old / "trace.jsonl").read_text().splitlines(keepends=True)
    (old / "trace.jsonl").write_text("".join(lines[1:]))
    text = page_of(tmp_path, old)
    for sentence in (
        "before the machine and the packages were recorded", "its settings are unknown", "Its journal cannot be read",
        "recorded before calls said whom they serve",
    ):  # fmt: skip
        assert sentence in text
    assert [
        "old",
        "em",
        "0.250 ±0.100 (version 0)",
        "0.750 ±0.100 (version 3)",
        "rose beyond both intervals",
    ] in cells(text, "Held-out")


def test_suffixes_say_what_is_written_and_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    for name in ("x.png", "x.svg", "x.html"):
        written = []
        for _ in range(2):
            assert main([str(run), "--out", str(tmp_path / name)]) == 0
            written.append((tmp_path / name).read_bytes())
        assert written[0] == written[1], name
    assert Image.open(tmp_path / "x.png").format == "PNG"
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_the_figures_of_a_page_are_written_as_pngs(tmp_path: Path) -> None:
    text = page_of(
        tmp_path, make(tmp_path / "a"), "--png", tmp_path / "figures", "--metric", "learner/entropy"
    )
    files = sorted((tmp_path / "figures").iterdir())
    assert len(files) == text.count("<figure>") > 5
    assert {Image.open(io.BytesIO(file.read_bytes())).format for file in files} == {"PNG"}
    assert "learning-01.png" in [file.name for file in files]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such"], "/no/such is no run folder"),
        (
            ["{run}", "--metric", "score/rewrd"],
            "score/rewrd: no run has recorded it; there are learner/entropy",
        ),
        (
            ["{run}", "--out", "x.pdf"],
            "--out x.pdf: expected a name that ends with .html, .png, .svg",
        ),
        (["{run}", "--out", "x.png", "--png", "folder"], "--png has no effect"),
        (["{run}=a", "{run}=a"], "given twice"),
        (["{young}", "--out", "x.svg"], "no update was made yet"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    places = {
        "run": make(tmp_path / "a"),
        "young": make(tmp_path / "young", rewards=[], ended=False),
    }
    given = [argument.format(**places) for argument in arguments]
    try:
        status = main(given if "--out" in given else [*given, "--out", str(tmp_path / "x.svg")])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_running_mean_has_a_twentieth_of_the_values() -> None:
    values = [0.0] * 100
    values[50] = 5.0
    assert [i for i, value in enumerate(smooth(values)) if value] == [48, 49, 50, 51, 52]
    assert smooth(values)[50] == 1.0


def test_the_newest_trees_alone_are_read_of_a_long_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "TREES", 1)
    monkeypatch.setattr(sections, "CHARACTERS", 20)
    text = page_of(tmp_path, make(tmp_path / "a"))
    assert set(re.findall(r"<summary>a, [a-z ]*: tree (\d)", text)) == {"2"}
    assert "coppice trees RUN --tree 2 --full prints the rest" in text


def test_the_help_fits_a_terminal_and_ends_with_examples() -> None:
    code = "from coppice.tools.inspecting.report import main; main(['--help'])"
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    assert "examples:" in lines[-8:]


CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
def test_a_browser_shows_the_page_in_both_schemes_without_errors_or_requests(
    tmp_path: Path,
) -> None:
    from playwright.sync_api import sync_playwright

    page_of(tmp_path, make(tmp_path / "a", text="<script>document.title = 'taken'</script>"))
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    grounds, said, asked = {}, [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        for scheme in ("light", "dark"):
            for width in (1280, 400):
                view = browser.new_page(
                    viewport={"width": width, "height": 800}, color_scheme=scheme
                )
                view.on("console", lambda message: said.append(message.text))
                view.on("pageerror", lambda error: said.append(str(error)))
                view.on("request", lambda request: asked.append(request.url))
                view.goto((tmp_path / "page.html").as_uri())
                assert view.title() == "Coppice report: a"
                assert [
                    head.inner_text() for head in view.get_by_role("heading", level=2).all()
                ] == list(SECTIONS)
                assert view.get_by_role("img", name="entropy (nats)").is_visible()
                assert view.evaluate("document.documentElement.scrollWidth") <= width
                look = "(e) => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('svg text')).fill]"
                grounds[scheme] = view.evaluate(look)
                view.close()
        browser.close()
    assert grounds == {
        "light": ["rgb(255, 255, 255)", "rgb(27, 28, 29)"],
        "dark": ["rgb(22, 24, 26)", "rgb(228, 230, 232)"],
    }
    assert said == []
    assert set(asked) == {(tmp_path / "page.html").as_uri()}


def test_the_record_of_the_machine_is_complete(tmp_path: Path) -> None:
    known = json.loads((make(tmp_path / "a") / "environment.json").read_text())
    assert known["python"] == sys.version.split()[0]
    assert known["cores"] >= 1
    assert known["memory_bytes"] > 2**28
    assert known["processor"]
    assert known["packages"]["numpy"].startswith("2.")
    assert re.fullmatch(
        r"[0-9a-f]{40}(-dirty)?" if (ROOT / ".git").exists() and shutil.which("git") else "",
        known["commit"],
    )
