"""TensorBoard's scalars of a run."""

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

# The generated protobuf modules define their messages at import, which a type checker cannot see.
_Event: Any = vars(event_pb2)["Event"]
_Session: Any = vars(event_pb2)["SessionLog"]
_Summary: Any = vars(summary_pb2)["Summary"]


class Board:
    """Writes scalars to a folder until ``close``."""

    def __init__(self, folder: Path):
        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def record(self, version: int, values: dict[str, float]) -> None:
        """Write one point of each metric."""
        scalars = [
            _Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name != "version"
        ]
        self._writer.add_event(
            _Event(wall_time=time.time(), step=version, summary=_Summary(value=scalars))
        )

    def restart(self, version: int) -> None:
        """Make TensorBoard drop the points from ``version`` on, which a crash took back."""
        start = _Session(status=_Session.START)
        self._writer.add_event(_Event(wall_time=time.time(), step=version, session_log=start))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
