"""Starts the processes of a run on the nodes of a Ray cluster, which all mount the run folder. Each
looks to the supervisor like a process of this machine (``Away``); on its node a ``Holder`` holds it
while the launcher is connected. Scheduler and judges' model stay with the launcher."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from coppice.common import shards
from coppice.common.process import without_secrets
from coppice.tools.defaults.settings import importable
from coppice.tools.launching import watchdog
from coppice.tools.launching.config import ConfigError
from coppice.tools.launching.failures import Cause
from coppice.tools.launching.processes import PlannedProcess, process_variables, spawn
from coppice.tools.launching.settings import Config

ABROAD = {
    "coppice.actors.worker", "coppice.judges.serve", "coppice.judges.retriever.worker",
    "coppice.learner.main",
}  # fmt: skip
"""The modules that may run on another node; the others run with the launcher."""
PASSED = ("COPPICE_", "HF_")
"""Variables of the launcher that processes on other nodes get, by how their names begin, beside the
keys that their settings name and ``cluster.pass_env``."""
KEPT = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|TMPDIR|LD_[A-Z_]+|(?i:(https?|no|all)_proxy)|"
    "\\w+_CA_BUNDLE|"
    "(LC|CUDA|NVIDIA|NCCL|GLOO|UCX|FI|HIP|ROCR|TORCH|TRITON|SGLANG|VLLM|XDG|SSL)_[A-Z0-9_]+"
)
"""Variables of a node that its processes keep, unless they look secret: it may hold the keys of
others."""
PATIENCE_S = 30.0
"""Seconds without room for a process before the launcher says so."""
ANSWER_S = 10.0
"""Seconds that a node has to tell what a process does there."""
LOST = 1
"""The exit status of a process that ended with its node."""
_TICK_S, _SEEN_S = 0.1, 5.0
"""Seconds between two looks at a process, and until a shared disk shows what was just written
elsewhere."""


class Holder:
    """Holds one process from ``start`` until its end. Its methods are called from afar, side by
    side."""

    async def address(self) -> tuple[str, int]:
        """Return this node's address and a free port of it, where the learner's ranks can meet."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    async def start(
        self, command: list[str], home: Path, endpoint: str, log: Path,
        environment: dict[str, str], folder: str, meeting: tuple[str, int] | None,
    ) -> tuple[str, int]:  # fmt: skip
        """Start a process, and return the host's name and the process's number. command: after the
        name of this node's Python. home: the folder of its scheduler, whose endpoint is
        ``endpoint``. folder: the launcher's, from which plug-ins are found. meeting: where the
        learner's ranks meet. Raises FileNotFoundError."""
        file, end = home / "endpoint", time.monotonic() + _SEEN_S
        while not (file.is_file() and file.read_text() == endpoint):  # of an earlier start?
            if not home.is_dir() or time.monotonic() > end:
                unseen = f"{socket.gethostname()} does not see the run folder {home}"
                raise FileNotFoundError(f"{unseen}: put runs on a disk that all nodes share")
            await asyncio.sleep(_TICK_S)
        own = dict(environment)
        if meeting is not None:
            own |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1])}
        words = [sys.executable, *command]
        place = folder if os.path.isdir(folder) else importable()
        kept = {k: v for k, v in without_secrets().items() if KEPT.fullmatch(k)}
        with log.open("ab") as written:
            self._process = spawn(words, kept, own, cwd=place, stdout=written, stderr=written)
        self._log = log
        return socket.gethostname(), self._process.pid

    async def end(self) -> int:
        while (status := self._process.poll()) is None:
            await asyncio.sleep(_TICK_S)
        return status

    async def activity(self) -> tuple[str, str]:
        return await asyncio.to_thread(watchdog.activity, self._process.pid, self._log)

    async def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.Signals(number))


class Away:
    """A process on some node, with the part of ``subprocess.Popen`` that the supervisor uses. It
    starts when the cluster has room. pid: 0 until then. verdict: why it ended, if the process
    itself could not say."""

    stdout = None

    def __init__(self, holder: Any, started: Any, needs: str, say: Callable[[str], None]):
        self.pid, self.host, self.returncode = 0, "", None
        self.verdict: Cause | None = None
        self._holder, self._pending, self._needs, self._say = holder, started, needs, say
        self._patient = time.monotonic() + PATIENCE_S

    def poll(self) -> int | None:
        """Take the news that has come, and return the exit status, None before the end."""
        while self.returncode is None and self._news(0):
            pass
        return self.returncode

    def wait(self) -> int:
        """Return the exit status."""
        while self.returncode is None:
            self._news(0.2)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; a process that has no place yet ends of it."""
        if self.pid and number != signal.SIGKILL:
            self._holder.signal.remote(int(number))
        elif self.returncode is None:  # the process dies with its holder
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

    def _news(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the holder's next answer. Return whether it came."""
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
            if isinstance(answer, int):
                self._over(answer)
            else:
                (self.host, self.pid), self._pending = answer, self._holder.end.remote()
        return True

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
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            unsafe = "without RAY_AUTH_MODE=token Ray runs the code of whoever reaches its ports"
            say(f"warning: {unsafe}: start it with a token (docs/cluster.md)")
        self.gpus = bool(ray.cluster_resources().get("GPU"))
        self._ranks: Any = None
        self._meeting: Any = None

    def reaching(self, config: Config) -> Config:
        """Return the config with a scheduler that the nodes can reach, unless it names where to
        listen."""
        s = config.scheduler
        if s.bind != type(s)().bind:
            return config
        bind = f"tcp://{_ray().util.get_node_ip_address()}:0"
        return replace(config, scheduler=replace(s, bind=bind))

    def takes(self, spec: PlannedProcess) -> bool:
        """Return whether the process runs on the cluster, and not with the launcher."""
        here = spec.module == "coppice.judges.serve" and self.config.judges.model
        return spec.module in ABROAD and not here

    def start(self, spec: PlannedProcess, run: Path, log: Path) -> Away:
        """Ask for a process. It starts when a node has room for it."""
        ray, a, gpus = _ray(), self.config.actors, 0
        if spec.module == "coppice.learner.main":
            gpus = 1
        elif spec.module == "coppice.actors.worker":
            gpus = a.own_gpus if a.served else 1
        options: dict[str, Any] = {"num_cpus": spec.threads, "num_gpus": gpus if self.gpus else 0}
        needs = f"{spec.name} ({options['num_cpus']} CPU, {options['num_gpus']} GPU)"
        if spec.vital:
            options["scheduling_strategy"] = self._place(spec, options)
        elif not options["num_gpus"]:
            options["scheduling_strategy"] = "SPREAD"
        holder = ray.remote(Holder).options(**options, max_concurrency=16, max_restarts=0).remote()
        rank = spec.environment.get("RANK")
        if rank == "0":
            self._meeting = holder.address.remote()
        # Ray starts a rank when rank 0's address is known, because that is an argument of the call.
        meeting = self._meeting if rank is not None else None
        named = spec.needed.union(self.config.cluster.pass_env)
        own = {k: v for k, v in os.environ.items() if k.startswith(PASSED) or k in named}
        own |= spec.environment | process_variables(spec.threads)
        own.pop("CUDA_VISIBLE_DEVICES", None)  # Ray sets that one
        home, file = shards.folder(run, spec.shard or 0), run / "processes" / f"{spec.file}.json"
        command = ["-m", spec.module, str(file)]
        endpoint = (home / "endpoint").read_text()
        started = holder.start.remote(command, home, endpoint, log, own, str(Path.cwd()), meeting)
        return Away(holder, started, needs, self.say)

    def close(self) -> None:
        """End all that still runs there, and leave the cluster."""
        _ray().shutdown()

    def _place(self, spec: PlannedProcess, options: dict[str, Any]) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rank = int(spec.environment.get("RANK", "0"))
        if rank == 0:
            if self._ranks is not None:
                remove_placement_group(self._ranks)
            bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
            bundle = {kind: number for kind, number in bundle.items() if number}
            bundles = [bundle] * self.config.learner.count
            self._ranks = placement_group(bundles, strategy="PACK")
        return PlacementGroupSchedulingStrategy(self._ranks, placement_group_bundle_index=rank)


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
