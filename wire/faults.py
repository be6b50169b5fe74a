"""The two kinds of fault, and what happens after each.

infrastructure: the same request may work later or on another worker, so it is retried and counted.
data: this task cannot work on any worker, so it is quarantined together with the reason.

A malformed action of the policy is not a fault. It is ordinary data and is scored as the method
says.
"""

from coppice.wire.messages import FaultKind


class Fault(Exception):
    """A classified failure of one call. ``kind`` decides whether the call is retried or its task is
    quarantined."""

    kind: FaultKind = "infrastructure"


class InfrastructureFault(Fault):
    """A worker or a connection failed, or a deadline passed. The call is retried on another worker."""


class DataFault(Fault):
    """No worker can serve this request. Its task is quarantined."""

    kind: FaultKind = "data"


FAULTS: dict[FaultKind, type[Fault]] = {"infrastructure": InfrastructureFault, "data": DataFault}


class WireError(ValueError):
    """A list of frames is not a message: there are too many frames, they are too large, or they do
    not hold what the header says."""
