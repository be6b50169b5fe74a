"""Whole runs of SLATE on a tiny model: to the end, stopped, killed and resumed, and with what users
get wrong."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from coppice.tools.evaluating.versions import chosen
from coppice.tools.inspecting.audit import audit
from tests.runs import Launch
from tests.scheduler.test_tracking import in_trackio, in_wandb
from tests.world import UPDATES

TWO = "actors.count=2 learner.count=2 scheduler.evaluation.questions=4"


def test_a_run_trains_to_its_end_and_leaves_what_it_promises(
    searching: Path, launch: Launch
) -> None:
    began = time.monotonic()
    run = launch(searching, "learner.count=2 scheduler.evaluation.questions=4", anew=True)
    assert "1 quarantined tasks" in run.finish()
    run.check()
    summary = run.summary()
    spent = summary["seconds"]
    assert sum(spent["phases"].values()) == pytest.approx(spent["this_start"])
    assert spent["this_start"] <= time.monotonic() - began
    journal = run.journal()
    for row in journal.trees("split='heldout' AND status='closed'"):
        sampled = [n.versions for n in journal.tree(row).nodes.values() if n.versions is not None]
        assert {version for versions in sampled for version in versions.tolist()} == {row.version}
    assert set(summary["heldout"]) == {"start", "end"}
    best = max(summary["heldout"].values(), key=lambda found: found["measures"]["em"]["mean"])
    assert chosen(run.folder, "best")[0] == summary["best"]["version"] == best["version"]
    updates = [record for record in run.records() if "learner/groups" in record]
    assert len(updates) == UPDATES
    # engine and learner agree on the same weights
    assert updates[0]["learner/logprob_gap_mean"] < 2e-5
    assert all(record["learner/staleness_max"] <= 2 for record in updates)
    assert list((run.folder / "tensorboard").iterdir())


def test_whole_weights_in_bfloat16_are_published_as_changes_through_kill_9(
    searching: Path, launch: Launch
) -> None:
    run = launch(searching, f"{TWO} model.dtype=bfloat16 learner.lora={{rank=0}}")
    run.killed_and_resumed()
    run.check()
    assert list((run.folder / "weights").glob("*/delta-*.safetensors"))
    gaps = [r["watch/engine_gap_max"] for r in run.records() if "watch/engine_gap_max" in r]
    assert gaps and max(gaps) < 0.4


def test_after_kill_9_of_every_process_a_resumed_run_loses_and_repeats_nothing(
    searching: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With top-p, where engine and learner must agree also on groups from the journal; with both
    trackers, which are offline, Prometheus, and records as JSON."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_API_KEY", "planted-6f1c0b7e4d2a")
    outlets = "--track=wandb --track=trackio scheduler.prometheus=127.0.0.1:0"
    run = launch(searching, f"{TWO} scheduler.top_p=0.9 scheduler.max_staleness=0 {outlets}")
    run.moved()
    url = (run.folder / "prometheus").read_text()
    scraped = urllib.request.urlopen(url, timeout=60).read().decode()
    assert f'coppice_health_updates{{run="run"}} {UPDATES}.0' in scraped
    run.kill_all()
    run.resume("--json")
    out = run.finish()
    run.check()
    assert set((run.folder / "metrics.jsonl").read_text().splitlines()) & set(out.splitlines())
    assert "first evaluation" not in run.summary()["seconds"]["phases"]
    # the cut alone moves them by up to -log 0.9
    assert max(record["learner/logprob_gap_max"] for record in run.trained()) < 2e-5
    for split in ("train", "heldout"):
        for tree in run.trees(f"split='{split}'"):
            for node in tree.nodes.values():
                cut = split == "train" and node.kind == "action"
                assert bool(node.support) == cut or not len(node.tokens)
    updates = [record for record in run.records() if "learner/groups" in record]
    losses = {record["version"]: record["learner/surrogate"] for record in updates}
    for name in ("wandb", "trackio"):  # as the terminal says where a tracker has not finished
        again = ["-m", "coppice.scheduler.telemetry.tracking", name, str(run.folder)]
        with (run.folder / "metrics.jsonl").open("rb") as records:
            subprocess.run([sys.executable, *again], stdin=records, check=True)
    for points in (in_trackio(run.folder), in_wandb(run.folder)):
        tracked = [step for step, loss in points if loss is not None]
        assert tracked == sorted({int(version) for version in losses}), "each update once"
    for log in ("wandb", "trackio", "scheduler"):
        assert "planted-6f1c0b7e4d2a" not in (run.folder / "logs" / f"{log}.log").read_text()


def test_a_run_is_stopped_by_ctrl_c_and_survives_killed_processes_unattended(
    searching: Path, launch: Launch
) -> None:
    quick = "scheduler.dispatch={dead_after_s=3.0,heartbeat_s=0.5}"
    run = launch(searching, f"scheduler.updates=5000 learner.count=2 {quick}")
    run.moved()
    run.launcher.send_signal(signal.SIGINT)
    assert f"coppice launch --resume {run.folder}" in run.finish(130)
    updates = run.version() + 9
    run.resume(f"scheduler.updates={updates}")
    for name in ("actor-0", "scheduler", "learner-1"):
        run.moved()
        run.signal(name, signal.SIGKILL)
    out = run.finish()
    killed = "killed by signal 9 (SIGKILL), most likely by the system for want of memory"
    for name, then in (("actor-0", "start"), ("scheduler", "resum"), ("learner-1", "resum")):
        assert out.count(f"{name}: {killed}; {then}ing") == 1, out
    run.check(updates)


def test_checkpoints_without_a_journal_end_the_run_at_once_with_cause_remedy_and_log(
    searching: Path, launch: Launch, tmp_path: Path
) -> None:
    torn = tmp_path / "run" / "checkpoints" / "v000001"
    torn.mkdir(parents=True)
    (torn / "state.json").write_text('{"version": ')
    run = launch(searching)
    out = run.finish(1)
    holds = f"{run.folder} holds weights of version 1 and an empty journal"
    assert f"scheduler failed: {holds}" in out
    assert "remedy: mend what the cause names" in out
    assert "resuming" not in out


def test_three_models_train_on_sharded_ranks_and_survive_kill_9_and_a_damaged_checkpoint(
    searching: Path, launch: Launch
) -> None:
    run = launch(
        searching,
        """learner.count=2 learner.sharding=fsdp scheduler.strategy=full learner.scheme=oprl
        learner.scheme_options.base=ppo learner.correction=decoupled learner.minibatches=2
        learner.prm={loss='cross_entropy',threshold=-1.0}""",
    )
    run.moved(2)
    run.kill_all()
    newest = sorted((run.folder / "checkpoints").glob("v??????"))[-1]
    os.truncate(newest / "critic-00001.safetensors", 100)
    run.resume()
    assert f"checkpoint {newest} is damaged" in run.finish()
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    run.check()
    assert audit(run.folder) == []
    trained = run.trained()
    assert all({"critic/loss", "prm/loss"} <= set(record) for record in trained)
    gaps = [r["watch/engine_gap_max"] for r in trained if "watch/engine_gap_max" in r]
    assert max(gaps) < 1e-3
    # 3 models on 2 ranks
    last = run.folder / "checkpoints" / f"v{UPDATES:06d}"
    assert len(list(last.glob("*-0000?.safetensors"))) == 6


def test_what_cannot_work_ends_with_a_message_not_a_hang(searching: Path, launch: Launch) -> None:
    run = launch(searching, "scheduler.bind=tcp://203.0.113.7:0")  # no address of this machine
    assert run.ended() != 0
    assert "cannot bind" in run.said()
