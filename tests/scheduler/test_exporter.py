"""Prometheus reads the newest values and the queues from the scheduler, and a scrape waits for
nothing."""

import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coppice.scheduler.telemetry.exporter import Exporter
from coppice.scheduler.telemetry.health import Health, Queue, WorkerHealth
from coppice.scheduler.telemetry.metrics import Metrics


def health() -> Health:
    workers = [
        WorkerHealth(name, 1, "here", ["generate"], 0.0, state, 0, 4, 1, 0, [])
        for name, state in (("a", "here"), ("b", "lost"))
    ]
    queues, moved = {"generate": Queue(4, 2, 1, 0.0, "", [])}, time.monotonic() - 3.0
    run = "updates", 7, 20, True, 5, 90, 2, moved, "", queues, workers, 30.0, 60.0, None, 0.25
    return Health(1, "here", 0.0, 0.0, *run)


def scraped(run: Path) -> dict[tuple[str, str], float]:
    text = urllib.request.urlopen((run / "prometheus").read_text(), timeout=30).read().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation.endswith("]") for family in families)
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, s.labels.get("service", "")): s.value for s in samples}


@pytest.mark.second
def test_a_scrape_has_the_newest_value_of_every_metric_and_the_queues(tmp_path: Path) -> None:
    metrics, reports = Metrics(tmp_path), [None, health()]
    exporter = Exporter(tmp_path, lambda: metrics.newest, lambda: reports[0])
    exporter.start("127.0.0.1:0")
    assert scraped(tmp_path) == {}
    metrics.record(1, {"score/reward": 0.1, "watch/turn_1/entropy": 2.0})
    metrics.record(2, {"score/reward": 0.2, "of/my-plugin": 9.0})
    reports.reverse()
    values = scraped(tmp_path)
    assert values["coppice_version", ""] == 2
    assert values["coppice_score_reward", ""] == 0.2
    assert values["coppice_watch_turn_1_entropy", ""] == 2.0
    assert values["coppice_of_my_plugin", ""] == 9.0
    for name, value in {"running": 4, "waiting": 2, "workers": 1}.items():
        assert values[f"coppice_health_{name}", "generate"] == value
    for name, value in {"growing": 5, "loop_lag": 0.25, "version": 7, "updates": 20}.items():
        assert values[f"coppice_health_{name}", ""] == value
    assert values["coppice_health_idle", ""] >= 3.0
    exporter.close()
    metrics.close()


def test_a_port_in_use_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exporter = Exporter(tmp_path, dict, lambda: None)
        exporter.start(f"127.0.0.1:{taken.getsockname()[1]}")
        exporter.close()
    told = capsys.readouterr().out
    assert told.startswith("<4>no endpoint for Prometheus: scheduler.prometheus = '127.0.0.1:")
    assert told.endswith("choose another port, or 0 for any\n")
    assert not (tmp_path / "prometheus").exists()
