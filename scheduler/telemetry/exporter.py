"""An endpoint for Prometheus: newest metrics, queues and workers, with the help texts of
docs/metrics.md. Its thread reads only objects that never change after they are published."""

import fnmatch
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import coppice
from coppice.common.atomic import write_whole
from coppice.scheduler.telemetry import alerts
from coppice.scheduler.telemetry.health import Health

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

PAGE = Path(coppice.__file__).with_name("metrics.md")


@functools.cache
def declared() -> dict[str, tuple[str, str]]:
    """Unit and meaning of each metric in the page's tables; none without the documents."""
    names = PAGE.read_text(encoding="utf-8").partition("## All names")[2] if PAGE.is_file() else ""
    rows = re.findall(r"^\| `(.+?)` \| (.+) \(([^()]+)\) \|$", names, re.MULTILINE)
    return {name: (unit, meaning) for name, meaning, unit in rows}


def declaration(name: str) -> tuple[str, str] | None:
    """Unit and meaning of a metric, or None for a plug-in's own."""
    rows = declared()
    matching = (rows[row] for row in rows if fnmatch.fnmatchcase(name, row))
    return rows.get(name) or next(matching, None)


def exported(name: str) -> str:
    return "coppice_" + re.sub(r"\W", "_", name)


class Exporter:
    """Serves from ``start`` to ``close``. metrics: the newest values; health: the newest report."""

    _server: tuple[Any, Thread] | None = None

    def __init__(
        self, run: Path, metrics: Callable[[], Mapping[str, float]],
        health: Callable[[], Health | None],
    ):  # fmt: skip
        self.run, self._metrics, self._health = run, metrics, health

    def start(self, address: str) -> None:
        """Serve at host:port, told in RUN/prometheus. A port in use is told and ends no run."""
        from prometheus_client import CollectorRegistry, start_http_server

        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(self)  # pyright: ignore[reportArgumentType]
        try:
            self._server = start_http_server(int(port), host, registry)
        except OSError as error:
            alerts.say(
                f"no endpoint for Prometheus: scheduler.prometheus = {address!r} cannot be used"
                f" ({error}): choose another port, or 0 for any"
            )
            return
        url = f"http://{host}:{self._server[0].server_port}/metrics"
        write_whole(self.run / "prometheus", url.encode())
        print(f"metrics for Prometheus at {url}", flush=True)

    def collect(self) -> "Iterator[GaugeMetricFamily]":
        """Yield the gauges of one scrape."""
        from prometheus_client.core import GaugeMetricFamily

        report = self._health()
        gauges: dict[str, Mapping[str, float]] = {k: {"": v} for k, v in self._metrics().items()}
        if report is not None:
            here = [worker.services for worker in report.workers if worker.state == "here"]
            for name in ("done", "evaluations", "growing", "updates", "version"):
                gauges[f"health/{name}"] = {"": getattr(report, name)}
            gauges["health/loop_lag"] = {"": report.lag_s}
            gauges["health/idle"] = {"": time.monotonic() - report.progress_at}
            queues = report.queues.items()
            gauges["health/running"] = {name: queue.running for name, queue in queues}
            gauges["health/waiting"] = {name: queue.waiting for name, queue in queues}
            gauges["health/workers"] = Counter(service for services in here for service in services)
        for name, values in gauges.items():
            unit, meaning = declaration(name) or ("", "a plug-in's own")
            labels = ["run"] if "" in values else ["run", "service"]
            gauge = GaugeMetricFamily(exported(name), f"{meaning} [{unit}]", labels=labels)
            for service, value in values.items():
                gauge.add_metric([self.run.name, service][: len(labels)], value)
            yield gauge

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
