"""The two kinds of fault, and what happens after each. A malformed action of the policy is not a
fault: it is ordinary data and is scored as the method says."""

from coppice.wire.messages import FaultKind


class Fault(Exception):
    """A classified failure of one call."""

    kind: FaultKind = "infrastructure"


class InfrastructureFault(Fault):
    """A worker or a connection failed, or a deadline passed. The request may work later or on
    another worker, so it is retried and counted."""


class Refused(InfrastructureFault):
    """An answer cannot be right. If there is no other worker to ask, the call fails with a
    DataFault."""


class DataFault(Fault):
    """No worker can serve this request. Its task is quarantined together with the reason."""

    kind: FaultKind = "data"


FAULTS: dict[FaultKind, type[Fault]] = {"infrastructure": InfrastructureFault, "data": DataFault}


class WireError(ValueError):
    """A list of frames is not a message: there are too many frames, they are too large, or they do
    not hold what the header says."""
