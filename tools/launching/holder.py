"""Holds one process of a run on a node of a cluster, for as long as the launcher is connected, and
reports to the launcher. A node that does not see the run folder gets a folder with what the process
needs: its file, the endpoint and the keys of its role alone."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from coppice.tools.defaults.settings import importable
from coppice.tools.launching import watchdog
from coppice.tools.launching.processes import spawn
from coppice.wire.keys import write_private

PLACE = "COPPICE_RUNS"
"""Variable of a node: where the folders of processes lie there, although the node may see the run
folder. Without it, they are temporary files."""
PIECE = 2**20
"""Bytes of a log that travel at once."""
_TICK_S, _REPORT_S, _SEEN_S = 0.1, 2.0, 5.0
"""Seconds between two looks at a process, before a report without news, and until a shared disk
shows what was just written elsewhere."""


class Delivery(msgspec.Struct, frozen=True):
    """A process to start. command: the arguments of Python before the process file. python: "" for
    the node's own interpreter. run: the folder of its scheduler. file: the path of the process
    file, body its content. keys: files of RUN/keys, by their path there. environment: of the
    process, beside the node's own. separable: whether the process can run where the run folder is
    not seen. folder: the launcher's, in which it runs if the node has it, since plug-ins and
    relative paths are found from there."""

    command: list[str]
    run: str
    file: str
    body: bytes
    endpoint: str
    keys: dict[str, str]
    environment: dict[str, str]
    python: str = ""
    separable: bool = False
    folder: str = ""


class Report(msgspec.Struct, frozen=True):
    """News of a process: what it wrote since the last report, and its exit status once it has ended
    and all was reported."""

    log: bytes
    status: int | None


def place(delivery: Delivery) -> tuple[Path, Path | None]:
    """Return the process file, and the folder that was made for the process alone, if one was.
    Raises FileNotFoundError with the remedy."""
    run, end = Path(delivery.run), time.monotonic() + _SEEN_S
    while PLACE not in os.environ:
        if (run / "endpoint").is_file() and (run / "endpoint").read_text() == delivery.endpoint:
            return Path(delivery.file), None
        if not run.is_dir() or time.monotonic() > end:
            break
        time.sleep(_TICK_S)
    if not delivery.separable:
        raise FileNotFoundError(
            f"{socket.gethostname()} does not see the run folder {run}: put runs on a disk that all"
            " nodes share, or set learner.publish_url, so that actors and judges need none"
        )
    folder = Path(tempfile.mkdtemp(prefix=f"{run.name}-", dir=os.environ.get(PLACE)))
    (folder / "processes").mkdir()
    (folder / "keys" / "peers").mkdir(parents=True)
    for name, text in delivery.keys.items():
        write_private(folder / "keys" / name, text)
    (folder / "endpoint").write_text(delivery.endpoint)
    body = msgspec.json.decode(delivery.body, type=dict[str, Any]) | {"run": str(folder)}
    file = folder / "processes" / Path(delivery.file).name
    write_private(file, msgspec.json.encode(body).decode())
    return file, folder


class Holder:
    """Holds one process from ``start`` until its end. Its methods are called from afar, one after
    the other or side by side."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._own: Path | None = None

    async def address(self) -> tuple[str, int]:
        """Return this node's address and a free port of it, where the learner's ranks can meet."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    async def start(self, delivery: Delivery, meeting: tuple[str, int] | None) -> tuple[str, int]:
        """Start the process, and return the host's name and the process's number. meeting: where
        the learner's ranks meet."""
        file, self._own = await asyncio.to_thread(place, delivery)
        own, log = dict(delivery.environment), self._log
        if meeting is not None:
            own |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1])}
        home = delivery.folder if os.path.isdir(delivery.folder) else importable()
        command = [delivery.python or sys.executable, *delivery.command, str(file)]
        self._process = spawn(command, os.environ, own, cwd=home, stdout=log, stderr=log)
        return socket.gethostname(), self._process.pid

    async def report(self, offset: int) -> Report:
        """Return what the process wrote after the first ``offset`` bytes: at once if there is
        something, or else within ``_REPORT_S``."""
        assert self._process is not None, "report before start"
        end = time.monotonic() + _REPORT_S
        while True:
            status = self._process.poll()  # before the look at the log, which is then whole
            piece = os.pread(self._log.fileno(), PIECE, offset)
            if status is not None and len(piece) < PIECE:
                if self._own is not None:
                    shutil.rmtree(self._own, ignore_errors=True)
                return Report(piece, status)
            if piece or time.monotonic() > end:
                return Report(piece, None)
            await asyncio.sleep(_TICK_S)

    async def activity(self) -> tuple[str, str]:
        """Return watchdog.activity of the process."""
        assert self._process is not None, "activity before start"
        log = Path(f"/proc/self/fd/{self._log.fileno()}")
        return await asyncio.to_thread(watchdog.activity, self._process.pid, log)

    async def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.Signals(number))
