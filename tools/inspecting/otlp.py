"""A run as OpenTelemetry traces (OTLP over HTTP): one trace per tree with its calls, one per update with its parts and links to its trees.

Each process of the run is a resource (service.namespace "coppice"). Times are those of the run's own clock, set to the machine's when the start began.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Link, Span, Tracer, set_span_in_context

from tools.inspecting.critical import Call, Recorded

TOGETHER = 512
"""Spans of one request."""
SCHEDULER, LEARNER = "scheduler", "learner"


def send(run: Recorded, name: str, url: str) -> int:
    """Send the spans of a run called ``name`` to a collector, and return their number. Raises ValueError if the run did not record the time of
    day, or the collector does not take them."""
    made = spans(run, name)
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")
    for sent in range(0, len(made), TOGETHER):
        if exporter.export(made[sent : sent + TOGETHER]) is not SpanExportResult.SUCCESS:
            raise ValueError(f"{url} took {sent} of {len(made)} spans: expected a collector of OTLP over HTTP there")
    return len(made)


def spans(run: Recorded, name: str) -> list[ReadableSpan]:
    """Return the spans of a run. A root comes after its children, as the SDK ends it last."""
    if run.epoch is None:
        raise ValueError("the run did not record the time of day, as runs of an earlier release")
    offset = run.epoch - run.began
    of = _Tracers(name)
    of_tree: defaultdict[int | None, list[Call]] = defaultdict(list)
    for call in run.calls:
        of_tree[call.tree].append(call)
    roots: dict[int, Span] = {}
    for tree, calls in of_tree.items():
        if tree is not None:
            roots[tree] = of.span(SCHEDULER, f"tree {tree}", min(call.start for call in calls) + offset)
        for call in calls:
            above = None if tree is None else roots[tree]
            span = of.span(call.worker, call.service, call.start + offset, above, {"outcome": call.outcome})
            for phase, start, end in call.phases:
                of.span(call.worker, phase, start + offset, span).end(_ns(end + offset))
            span.end(_ns(call.end + offset))
        if tree is not None:
            roots[tree].end(_ns(max(call.end for call in calls) + offset))
    for update in run.updates:
        links = [roots[tree] for tree in sorted(update.trees) if tree in roots]
        root = of.span(LEARNER, f"update {update.version}", update.work[0][1] + offset, links=links)
        for cause, start, end in (part for part in update.work if part[2] > part[1]):
            of.span(LEARNER, cause.removeprefix("learner: "), start + offset, root).end(_ns(end + offset))
        root.end(_ns(update.work[-1][2] + offset))
    return of.ended


class _Keeper(SpanProcessor):
    """Puts ended spans into a list."""

    def __init__(self, ended: list[ReadableSpan]):
        self.ended = ended

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span."""
        self.ended.append(span)


class _Tracers:
    """A tracer for each process, whose ended spans are kept."""

    def __init__(self, run: str):
        self._run, self._tracers = run, dict[str, Tracer]()
        self.ended: list[ReadableSpan] = []

    def span(
        self, process: str, name: str, start: float, parent: Span | None = None, known: Mapping[str, str] | None = None, links: Sequence[Span] = (),
    ) -> Span:  # fmt: skip
        """Start a span. start: seconds since 1970."""
        above = Context() if parent is None else set_span_in_context(parent, Context())
        related = [Link(span.get_span_context()) for span in links]
        return self._of(process).start_span(name, above, attributes=known, links=related, start_time=_ns(start))

    def _of(self, process: str) -> Tracer:

        if process not in self._tracers:
            resource = Resource({"service.namespace": "coppice", "service.name": process, "coppice.run": self._run})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(_Keeper(self.ended))
            self._tracers[process] = provider.get_tracer("coppice")  # pyright: ignore
        return self._tracers[process]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
