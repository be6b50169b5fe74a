"""Whole runs of the real processes on a tiny model: to the end, after kill -9 of everything, and
with what users get wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coppice.common import frontier
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry.exporter import declaration
from coppice.tools.evaluating.versions import chosen
from coppice.tools.inspecting.audit import audit
from tests import tiny

ROOT = Path(__file__).parent.parent.parent
UPDATES, QUESTIONS = 3, 3

CONFIG = """
name = "e2e"
[model]
name = "{model}"
[data]
train = "{folder}/tasks.jsonl"
heldout = "{folder}/tasks.jsonl"
corpus = "{folder}/corpus.jsonl"
[data.options]
prompt = "short"
topk = 1
[warm_start]
steps = 0
[scheduler]
strategy_options = {{ k = 3 }}
budget = 2
max_action_tokens = 12
updates = {updates}
questions_per_update = {questions}
max_staleness = 1
[scheduler.evaluation]
questions = 4
[actors]
count = 2
dtype = "float32"
kv_cache_gib = 0.01
[learner]
count = 2
lr = 1e-3
kl_coef = 0.001
entropy_coef = 0.01
dtype = "float32"
lora = {{ rank = 4, alpha = 8.0 }}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config over a tiny model and a small corpus; one of the task rows has no gold answer."""
    folder = tmp_path_factory.mktemp("e2e")
    prepare(folder)
    path = folder / "e2e.toml"
    path.write_text(
        CONFIG.format(model=folder / "model", folder=folder, updates=UPDATES, questions=QUESTIONS)
    )
    return path


def prepare(folder: Path) -> None:
    """Model, corpus and tasks."""
    tiny.save(folder / "model")
    facts = [
        ("Bulgaria", "Capital: Sofia"),
        ("Italy", "Capital: Rome"),
        ("Chile", "Capital: Santiago"),
    ]
    corpus = [
        {"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in enumerate(facts)
    ]
    tasks = [
        {
            "id": str(i),
            "question": f"What is the capital of {title}?",
            "golden_answers": [text.split(": ")[1]],
        }
        for i, (title, text) in enumerate(facts * 4)
    ]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)) + "\n")
    (folder / "tasks.jsonl").write_text(
        "\n".join(map(json.dumps, [*tasks, {"question": "Nobody knows"}])) + "\n"
    )


def launch(config: Path, run: Path, *arguments: str, folder: Path = ROOT) -> subprocess.Popen[str]:
    """coppice launch as the first of a process group of its own, started in ``folder``."""
    command = [
        sys.executable,
        "-c",
        "import sys; from coppice.tools.launching.command import main; sys.exit(main())",
    ]
    command += [
        *([] if "--resume" in arguments else ["--config", str(config), "--run-folder", str(run)]),
        *arguments,
    ]
    environment = os.environ | {
        "COPPICE_CACHE": str(config.parent / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=240)
    return out


def undeclared(run: Path) -> list[str]:
    """The names in the run's records that docs/metrics.md lacks."""
    names: set[str] = set().union(
        *(json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    )
    return sorted(name for name in names if declaration(name) is None)


def check_whole(run: Path) -> None:
    """As ``check_groups``, for this page's config."""
    check_groups(run, UPDATES, QUESTIONS)
    check_gradients(run, UPDATES)


def check_groups(run: Path, updates: int, questions: int) -> None:
    """Every drawn task once, every group trained once, all updates done, every metric declared."""
    assert undeclared(run) == []
    journal = Journal(run / "journal.sqlite", readonly=True)
    trees = journal.trees("split='train'")
    assert [t.position for t in trees] == list(range(updates * questions))
    assert {t.status for t in trees} == {"closed"}
    groups = [(g, v) for t in trees for g, v in journal.groups(t.id)]
    assert len({g for g, _ in groups}) == len(groups)
    assert {v for _, v in groups} == set(range(1, updates + 1))
    by_tree = [{v for _, v in journal.groups(t.id)} for t in trees]
    assert all(len(versions) == 1 for versions in by_tree)
    for version in range(1, updates + 1):
        assert sum(version in versions for versions in by_tree) == questions
    assert frontier.read(run, updates).groups() == dict(groups)


def check_gradients(run: Path, updates: int) -> None:
    """Every update had something to learn."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    norms = [record["learner/grad_norm"] for record in records if "learner/grad_norm" in record]
    assert len(norms) >= updates
    assert min(norms) > 0


def check_seconds(run: Path, first: int, most: float) -> None:
    """The phases of the start that began with version ``first`` add up to no more than the command
    took, ``most`` seconds."""
    spent = json.loads((run / "summary.json").read_text())["seconds"]
    phases, training = spent["phases"], spent["training"]
    assert {"starting processes", "updates", "last evaluation", "stopping"} <= set(phases)
    assert ("first evaluation" in phases) == (not training["resumed"])
    assert sum(phases.values()) == pytest.approx(spent["this_start"])
    assert 0 < training["seconds"] < spent["this_start"] <= most
    assert (training["first"], training["last"]) == (first, UPDATES)
    assert sum(training["learner"].values()) == pytest.approx(training["seconds"])
    assert training["learner"]["updates"] > 0
    journal = Journal(run / "journal.sqlite", readonly=True)
    for row in journal.trees("split='heldout' AND status='closed'"):
        sampled = [
            node.versions for node in journal.tree(row).nodes.values() if node.versions is not None
        ]
        assert {version for versions in sampled for version in versions.tolist()} == {row.version}


def left_over(run: Path) -> list[str]:
    """Processes of the run that still live."""
    found = subprocess.run(
        ["pgrep", "-fa", str(run)], capture_output=True, text=True, check=False
    ).stdout
    return [line for line in found.splitlines() if "pgrep" not in line]


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 2e-5), ("bfloat16", 0.03)])
def test_a_run_trains_to_its_end_and_leaves_what_it_promises(
    config: Path, tmp_path: Path, dtype: str, gap: float
) -> None:
    run, began = tmp_path / "run", time.monotonic()
    process = launch(
        config, run, "--set", f"learner.dtype={dtype}", "--set", f"actors.dtype={dtype}"
    )
    out = finish(process)
    assert process.returncode == 0, out
    check_whole(run)
    check_seconds(run, 0, time.monotonic() - began)
    assert f"number type {dtype} (as the config says" in out
    assert "held-out start" in out
    assert "held-out end" in out
    assert "1 tasks quarantined" in out
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["heldout"]) == {"start", "end"}
    best = max(summary["heldout"].values(), key=lambda found: found["measures"]["em"]["mean"])
    assert chosen(run, "best")[0] == summary["best"]["version"] == best["version"]
    assert set(summary["baselines"]) == {"random_answer", "best_constant_answer"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [r for r in records if "learner/groups" in r]
    assert len(updates) == UPDATES
    # engine and learner agree on the same weights
    assert updates[0]["learner/logprob_gap_mean"] < gap
    assert all(r["learner/staleness_max"] <= 2 for r in updates)
    assert list((run / "tensorboard").iterdir())
    assert not left_over(run)
    dump = [
        sys.executable,
        "-c",
        "import sys; from coppice.tools.inspecting.dump import main; sys.exit(main())",
        str(run),
    ]
    shown = subprocess.run(dump, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "admitted at version" in shown
    assert "reward" in shown
    as_json = subprocess.run(
        [*dump, "--jsonl", "--all"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    trees = [json.loads(line) for line in as_json.splitlines()]
    assert len(trees) == UPDATES * QUESTIONS
    assert all(sum(n["chosen"] and n["kind"] == "action" for n in t["nodes"]) >= 1 for t in trees)


def wait_for_update(run: Path, process: subprocess.Popen[str], count: int = 1) -> None:
    """Until so many updates are recorded."""
    end = time.monotonic() + 200
    while time.monotonic() < end and process.poll() is None:
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(
            b"learner/groups"
        ) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(
        f"no update came: {process.communicate()[0] if process.poll() is not None else ''}"
    )


def kill(run: Path, process: subprocess.Popen[str], updates: int = 1) -> None:
    """Kill -9 the launcher after so many updates; no process outlives it."""
    wait_for_update(run, process, updates)
    process.send_signal(signal.SIGKILL)
    process.wait()
    gone(run)


def kill_everything(run: Path, process: subprocess.Popen[str]) -> None:
    """Kill -9 the whole process group; nothing is left."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    gone(run)


def gone(run: Path) -> None:
    """Until no process of the run is left."""
    end = time.monotonic() + 30
    while left_over(run) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left_over(run)


def test_after_kill_9_of_every_process_a_resumed_run_loses_and_repeats_nothing(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kill(run, launch(config, run))
    resumed, began = launch(config, run, "--resume", str(run)), time.monotonic()
    out = finish(resumed)
    assert resumed.returncode == 0, out
    check_whole(run)
    first = json.loads((run / "summary.json").read_text())["seconds"]["training"]["first"]
    assert f"(resumed at version {first})" in out
    check_seconds(run, first, time.monotonic() - began)


def test_with_top_p_engine_and_learner_agree_also_on_groups_that_a_resumed_journal_sends(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kill(
        run,
        launch(config, run, "--set", "scheduler.top_p=0.9", "--set", "scheduler.max_staleness=0"),
    )
    process = launch(config, run, "--resume", str(run))
    out = finish(process)
    assert process.returncode == 0, out
    check_whole(run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "learner/grad_norm" in record]
    assert {record["version"] for record in trained} == set(range(1, UPDATES + 1))
    assert (
        max(record["learner/logprob_gap_max"] for record in trained) < 2e-5
    )  # the cut alone moves them by up to -log 0.9
    assert "log-probability difference" not in out
    journal = Journal(run / "journal.sqlite", readonly=True)
    nodes = [
        (row.split, node)
        for row in journal.trees()
        for node in journal.tree(row).nodes.values()
        if len(node.tokens)
    ]
    assert all(
        bool(node.support) == (split == "train" and node.kind == "action") for split, node in nodes
    )


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(config, run)
    wait_for_update(run, process)
    process.send_signal(signal.SIGINT)
    out = finish(process)
    assert process.returncode == 130, out
    assert f"coppice launch --resume {run}" in out
    assert not left_over(run)


def test_a_killed_actor_is_replaced_and_the_run_goes_on(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(
        config,
        run,
        "--set",
        "scheduler.dispatch.dead_after_s=3",
        "--set",
        "scheduler.dispatch.heartbeat_s=0.5",
    )
    wait_for_update(run, process)
    subprocess.run(["pkill", "-9", "-f", f"{run}/processes/actor-0.json"], check=True)
    out = finish(process)
    assert process.returncode == 0, out
    assert (
        "actor-0: killed by signal 9 (SIGKILL), most likely by the system for want of memory; starting it again"
        in out
    )
    check_whole(run)


def kill_one(run: Path, file: str) -> None:
    """Kill -9 the newest process of a process file."""
    pid = subprocess.run(
        ["pgrep", "-n", "-f", f"{run}/processes/{file}.json"], capture_output=True, check=True
    ).stdout
    os.kill(int(pid), signal.SIGKILL)


def test_a_killed_scheduler_and_a_killed_rank_are_survived_unattended(
    config: Path, tmp_path: Path
) -> None:
    run, updates = tmp_path / "run", 12
    process = launch(
        config, run, "--set", f"scheduler.updates={updates}", "--set", "actors.count=1"
    )
    wait_for_update(run, process)
    kill_one(run, "scheduler")
    records = (run / "metrics.jsonl").read_bytes().count(b"learner/groups")
    wait_for_update(run, process, records + 1)
    kill_one(run, "learner")  # the newest: rank 1
    out = finish(process)
    assert process.returncode == 0, out
    for name in ("scheduler", "learner-1"):
        assert (
            out.count(
                f"{name}: killed by signal 9 (SIGKILL), most likely by the system for want of memory; resum"
            )
            == 1
        ), out
    check_groups(run, updates, QUESTIONS)
    assert not left_over(run)


def test_checkpoints_without_a_journal_end_the_run_at_once_with_cause_remedy_and_log(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    torn = run / "checkpoints" / "v000001"
    torn.mkdir(parents=True)
    (torn / "state.json").write_text('{"version": ')
    process = launch(config, run, "--set", "learner.count=1")
    out = finish(process)
    assert process.returncode == 1, out
    cause, remedy, log = out.strip().splitlines()[-3:]
    assert cause.startswith(
        f"scheduler failed: {run} holds weights of version 1 and an empty journal"
    ), out
    assert remedy.startswith("remedy: mend what the cause names")
    assert log == f"log: {run}/logs/scheduler.log"
    assert "resuming" not in out
    assert not left_over(run)


def test_policy_critic_and_reward_model_train_on_sharded_ranks_and_survive_kill_9_and_a_damaged_checkpoint(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = [
        "scheduler.strategy=full",
        "learner.scheme=oprl",
        "learner.scheme_options.base=ppo",
        "learner.correction=decoupled",
        "learner.minibatches=2",
        "learner.sharding=fsdp",
        "learner.prm.loss=cross_entropy",
        "learner.prm.threshold=-1.0",
    ]
    kill(
        run,
        launch(config, run, *(part for setting in settings for part in ("--set", setting))),
        updates=2,
    )
    newest = sorted((run / "checkpoints").glob("v??????"))[-1]
    os.truncate(newest / "critic-00001.safetensors", 100)
    process = launch(config, run, "--resume", str(run))
    out = finish(process)
    assert process.returncode == 0, out
    assert f"checkpoint {newest} is damaged" in out
    assert newest.with_name(newest.name + ".damaged").is_dir()
    check_whole(run)
    assert audit(run) == []
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "learner/grad_norm" in record]
    assert {record["version"] for record in trained} == set(range(1, UPDATES + 1))
    assert all(
        {"critic/loss", "prm/loss", "watch/ratio_p50", "learner/trunk_repeat"} <= set(r)
        for r in trained
    )
    assert max(r["watch/engine_gap_max"] for r in trained if "watch/engine_gap_max" in r) < 1e-3
    # 3 models on 2 ranks
    assert len(list((run / "checkpoints" / f"v{UPDATES:06d}").glob("*-0000?.safetensors"))) == 6


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.name=/no/such/model", "model.name"),
        ("data.train=/no/such.jsonl", "no/such.jsonl"),
        ("data.corpus=/no/such.jsonl", "data.corpus"),
        ("learner.scheme=slat", "expected one of"),
        ("scheduler.bind=tcp://0.0.0.0:bad", "cannot bind"),
    ],
)
def test_what_cannot_work_ends_with_a_message_not_a_hang(
    config: Path, tmp_path: Path, setting: str, message: str
) -> None:
    process = launch(config, tmp_path / "run", "--set", setting)
    out = finish(process)
    assert process.returncode != 0
    assert message in out, out
    assert not left_over(tmp_path / "run")
