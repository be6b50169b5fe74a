"""Spans for OpenTelemetry, received by a real HTTP server and read with the protocol's own messages."""

import gzip
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.run_folder import make
from tools.inspecting import critical, otlp, runs
from tools.inspecting.trace import main

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A server's address and the requests that it took. It refuses from the third on."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            assert self.path == "/v1/traces"
            if len(taken) < 2:
                taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if len(taken) < 2 else 400)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", taken
    server.shutdown()
    server.server_close()


def test_trees_calls_phases_and_updates_arrive_as_spans(
    tmp_path: Path, collector: tuple[str, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, taken = collector
    run = make(tmp_path / "run")
    assert main([str(run), "--otlp", url]) == 0
    assert "24 spans sent" in capsys.readouterr().out
    known = critical.recorded(run, runs.read(run).records)
    by_process = {}
    for resource in taken[0].resource_spans:
        of = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        assert (of["service.namespace"], of["coppice.run"]) == ("coppice", "run")
        by_process[of["service.name"]] = [span for scope in resource.scope_spans for span in scope.spans]
    assert {name: len(spans) for name, spans in by_process.items()} == {"scheduler": 3, "actor-0": 9, "learner": 12}
    (tree,) = (span for span in by_process["scheduler"] if span.name == "tree 1")
    (call,) = (span for span in by_process["actor-0"] if span.parent_span_id == tree.span_id)
    assert (call.name, call.trace_id) == ("generate", tree.trace_id)
    assert known.epoch is not None
    start = known.epoch + known.calls[1].start - known.began
    assert (call.start_time_unix_nano / 1e9, call.end_time_unix_nano / 1e9) == pytest.approx(
        (start, start + 1), abs=1e-3
    )
    phases = [span.name for span in by_process["actor-0"] if span.parent_span_id == call.span_id]
    assert phases == ["prefill", "decode"]
    (update,) = (span for span in by_process["learner"] if span.name == "update 2")
    assert [link.span_id for link in update.links] == [tree.span_id]
    parts = [span.name for span in by_process["learner"] if span.parent_span_id == update.span_id]
    assert parts == ["forward", "updates, other work", "publishing weights"]


def test_a_collector_that_refuses_and_a_run_without_the_time_of_day_are_told(
    tmp_path: Path,
    collector: tuple[str, list[Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, _ = collector
    monkeypatch.setattr(otlp, "TOGETHER", 10)
    run = make(tmp_path / "run")
    assert main([str(run), "--otlp", url]) == 2
    assert f"{url} took 10 of 24 spans: expected a collector" in capsys.readouterr().err
    trace = run / "trace.jsonl"
    trace.write_text(trace.read_text().replace('"epoch"', '"then"'))
    assert main([str(run), "--otlp", url]) == 2
    assert "did not record the time of day" in capsys.readouterr().err
