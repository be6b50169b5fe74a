"""Starts the processes of a run on the nodes of a Ray cluster. Each looks to the supervisor like a
process of this machine (``Away``); on its node a ``Holder`` holds it while the launcher is
connected. Scheduler and judges' model stay with the launcher."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from coppice.common import shards
from coppice.tools.defaults.settings import importable
from coppice.tools.launching import watchdog
from coppice.tools.launching.config import ConfigError
from coppice.tools.launching.failures import Cause
from coppice.tools.launching.processes import PlannedProcess, process_variables, spawn
from coppice.tools.launching.settings import Config
from coppice.wire.keys import write_private

ROLE_OF = {
    "coppice.actors.worker": "actor",
    "coppice.judges.serve": "judge",
    "coppice.judges.retriever.worker": "retriever",
    "coppice.learner.main": "learner",
}
"""The role of each module that may run on another node; the others run with the launcher."""
PASSED = ("COPPICE_", "HF_")
"""Variables of the launcher that processes on other nodes get, by how their names begin, beside the
keys that their settings name."""
STORAGE = ("FSSPEC_", "AWS_", "AZURE_STORAGE_", "GOOGLE_")
"""Variables by which fsspec reaches a storage: ranks and actors get them too, where
``learner.publish_url`` names one."""
PATIENCE_S = 30.0
"""Seconds without room for a process before the launcher says so."""
ANSWER_S = 10.0
"""Seconds that a node has to tell what a process does there."""
LOST = 1
"""The exit status of a process that ended with its node."""


PLACE = "COPPICE_RUNS"
"""Variable of a node: where the folders of processes lie there, although the node may see the run
folder. Without it, they are temporary files."""
PIECE = 2**20
"""Bytes of a log that travel at once."""
_TICK_S, _REPORT_S, _SEEN_S = 0.1, 2.0, 5.0
"""Seconds between two looks at a process, before a report without news, and until a shared disk
shows what was just written elsewhere."""


class Delivery(msgspec.Struct, frozen=True):
    """A process to start. command: the arguments of Python before the process file. run: the folder
    of its scheduler. file: the path of the process file, body its content. keys: files of RUN/keys,
    by their path there. environment: of the process, beside the node's own. separable: whether the
    process can run where the run folder is not seen. folder: the launcher's, in which it runs if
    the node has it, since plug-ins and relative paths are found from there."""

    command: list[str]
    run: str
    file: str
    body: bytes
    endpoint: str
    keys: dict[str, str]
    environment: dict[str, str]
    separable: bool = False
    folder: str = ""


class ProcessNews(msgspec.Struct, frozen=True):
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
        command = [sys.executable, *delivery.command, str(file)]
        self._process = spawn(command, os.environ, own, cwd=home, stdout=log, stderr=log)
        return socket.gethostname(), self._process.pid

    async def report(self, offset: int) -> ProcessNews:
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
                return ProcessNews(piece, status)
            if piece or time.monotonic() > end:
                return ProcessNews(piece, None)
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


class Away:
    """A process on some node, with the part of ``subprocess.Popen`` that the supervisor uses. It
    starts when the cluster has room. pid: 0 until then. verdict: why it ended, if the process
    itself could not say."""

    stdout = None

    def __init__(
        self, holder: Any, started: Any, log: Path, needs: str, say: Callable[[str], None]
    ):
        self.pid, self.host, self.returncode = 0, "", None
        self.verdict: Cause | None = None
        self._holder, self._pending, self._log = holder, started, log
        self._needs, self._say = needs, say
        self._offset, self._patient = 0, time.monotonic() + PATIENCE_S

    def poll(self) -> int | None:
        """Take the news that has come, and return the exit status, None before the end."""
        while self.returncode is None and self._news(0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout if timeout is not None else None
        while self.returncode is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self._needs, timeout or 0.0)
            self._news(0.2)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; a process that has no place yet ends of it."""
        ray = _ray()
        if self.pid and number != signal.SIGKILL:
            self._holder.signal.remote(int(number))
        elif self.returncode is None:
            if self.pid:  # what it wrote last comes first
                with contextlib.suppress(ray.exceptions.RayError, subprocess.TimeoutExpired):
                    ray.get(self._holder.signal.remote(int(number)), timeout=2)
                    self.wait(2)
            if self.returncode is None:
                self._over(-int(number))

    def activity(self) -> tuple[str, str]:
        """Return watchdog.activity of the process, as far as its node says it."""
        ray = _ray()
        if not self.pid:
            return "no node has room for it yet", ""
        try:
            return ray.get(self._holder.activity.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError:
            return f"its node {self.host} does not answer", ""

    def kill(self) -> None:
        """Kill the process, wherever it is."""
        self.send_signal(signal.SIGKILL)

    def _news(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for one answer of the holder. Return whether there may
        be more."""
        ray = _ray()
        if not ray.wait([self._pending], timeout=timeout)[0]:
            if not self.pid and time.monotonic() > self._patient:
                self._patient = float("inf")
                self._say(f"no node has room for {self._needs}: it starts as soon as one has")
            return False
        try:
            answer = ray.get(self._pending)
        except ray.exceptions.RayTaskError as error:  # the holder could not start it
            self.verdict = Cause(str(error.cause), False)
            self._over(LOST)
        except ray.exceptions.RayError as error:
            lost = f"its node {self.host} is lost ({type(error).__name__})".replace("  ", " ")
            self.verdict = Cause(lost, True)
            self._over(LOST)
        else:
            self._take(answer)
        return True

    def _take(self, answer: Any) -> None:
        if isinstance(answer, ProcessNews):
            self._offset += len(answer.log)
            with self._log.open("ab") as log:
                log.write(answer.log)
            if answer.status is not None:
                return self._over(answer.status)
        else:
            self.host, self.pid = answer
            self._patient = float("inf")
        self._pending = self._holder.report.remote(self._offset)
        return None

    def _over(self, status: int) -> None:
        self.returncode = status
        _ray().kill(self._holder)


class Nodes:
    """The connection to a cluster, from its construction to ``close``. Raises ConfigError with the
    remedy if there is no cluster."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        ray = _ray()
        self.config, self.say = config, say
        address = config.cluster.on if "://" in config.cluster.on else "auto"
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        try:
            ray.init(address, runtime_env={"env_vars": {"PYTHONPATH": str(importable())}}, **quiet)
        except (ConnectionError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"cluster.on = {config.cluster.on!r}: no Ray cluster answers"
                f" ({str(error).splitlines()[0]}): start one with `ray start --head`, and"
                " `ray start --address HOST:6379` on each further node, or name it"
            ) from None
        self.gpus = bool(ray.cluster_resources().get("GPU"))
        self.here = ray.get_runtime_context().get_node_id()
        self._ranks: Any = None
        self._meeting: Any = None

    def address(self) -> str:
        """Return the address of the launcher's machine as the cluster sees it."""
        return _ray().util.get_node_ip_address()

    def takes(self, spec: PlannedProcess) -> bool:
        """Return whether the process runs on the cluster, and not with the launcher."""
        here = spec.module == "coppice.judges.serve" and self.config.judges.model
        return spec.module in ROLE_OF and not here

    def start(self, spec: PlannedProcess, run: Path, log: Path) -> Away:
        """Ask for a process. It starts when a node has room for it."""
        ray = _ray()
        options = self._resources(spec)
        needs = f"{spec.name} ({options['num_cpus']} CPU, {options['num_gpus']} GPU)"
        if spec.module == "coppice.learner.main":
            options |= self._placement(spec, options)
        elif not options["num_gpus"]:
            options["scheduling_strategy"] = "SPREAD"
        holder = ray.remote(Holder).options(**options, max_concurrency=16, max_restarts=0).remote()
        rank = spec.environment.get("RANK")
        if rank == "0":
            self._meeting = holder.address.remote()
        # Ray starts a rank when rank 0's address is known, because that is an argument of the call.
        meeting = self._meeting if rank is not None else None
        started = holder.start.remote(self._delivery(spec, run), meeting)
        return Away(holder, started, log, needs, self.say)

    def close(self) -> None:
        """End all that still runs there, and leave the cluster."""
        _ray().shutdown()

    def _resources(self, spec: PlannedProcess) -> dict[str, Any]:
        a, gpus = self.config.actors, 0
        if spec.module == "coppice.learner.main":
            gpus = 1
        elif spec.module == "coppice.actors.worker":
            gpus = a.sglang.gpus * (a.sglang.way != "url") if a.engine == "sglang" else 1
        return {"num_cpus": spec.threads, "num_gpus": gpus if self.gpus else 0}

    def _placement(self, spec: PlannedProcess, options: dict[str, Any]) -> dict[str, Any]:
        """Place the learner's ranks together, on as few nodes as hold them; without a disk that all
        nodes share, with the launcher."""
        from ray.util import scheduling_strategies as strategies
        from ray.util.placement_group import placement_group, remove_placement_group

        if self.config.learner.publish_url:
            here = strategies.NodeAffinitySchedulingStrategy(self.here, soft=False)
            return {"scheduling_strategy": here}
        rank = int(spec.environment.get("RANK", "0"))
        if rank == 0:
            if self._ranks is not None:
                remove_placement_group(self._ranks)
            bundle = {"CPU": options["num_cpus"]}
            bundle |= {"GPU": options["num_gpus"]} if options["num_gpus"] else {}
            self._ranks = placement_group([bundle] * self.config.learner.count, strategy="PACK")
        strategy = strategies.PlacementGroupSchedulingStrategy(
            self._ranks, placement_group_bundle_index=rank
        )
        return {"scheduling_strategy": strategy}

    def _delivery(self, spec: PlannedProcess, run: Path) -> Delivery:
        role, home = ROLE_OF[spec.module], shards.folder(run, spec.shard or 0)
        file, keys = run / "processes" / f"{spec.file}.json", home / "keys"
        names = ("server_public", f"peers/{role}.json")
        stores = self.config.learner.publish_url and role in ("actor", "learner")
        passed = PASSED + (STORAGE if stores else ())
        own = {k: v for k, v in os.environ.items() if k.startswith(passed) or k in spec.needed}
        # Ray sets that one
        theirs = {k: v for k, v in spec.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
        environment = own | theirs | process_variables(spec.threads)
        separable = role != "learner" and bool(self.config.learner.publish_url or role != "actor")
        texts = {name: (keys / name).read_text() for name in names}
        return Delivery(
            ["-m", spec.module], str(home), str(file), file.read_bytes(),
            (home / "endpoint").read_text(), texts, environment, separable,
            str(Path.cwd()),
        )  # fmt: skip


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # pages of Ray's own logs when a node is lost
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
    try:
        import ray
    except ImportError:
        remedy = "pip install 'coppice-rl[ray]', or leave out --cluster"
        raise ConfigError(f"cluster.on names Ray, which is not installed: {remedy}") from None
    return ray


def reachable(config: Config, address: str) -> Config:
    """Return the config with a scheduler that the nodes can reach, unless it names where to listen.
    address: of this machine."""
    s = config.scheduler
    if s.bind != type(s)().bind:
        return config
    s = msgspec.structs.replace(s, bind=f"tcp://{address}:0")
    return msgspec.structs.replace(config, scheduler=s)
