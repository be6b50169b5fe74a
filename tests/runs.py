"""A whole run as its user has it: launched, observed from outside, resumed, ended, checked."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from coppice.common import frontier, shards
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import UPDATE
from coppice.scheduler.telemetry.exporter import declaration
from coppice.tools.launching import record
from coppice.wire.messages import Turn
from tests.forks import ROOT, Launcher, Server
from tests.world import QUESTIONS, UPDATES

PATIENCE_S = 240.0
_LOOK_S = 0.05
_LAUNCH = "import sys; from coppice.tools.launching.command import main; sys.exit(main())"


class Lost(AssertionError):
    """The run did what it may not: it ended, stood still, or said nothing of what ended it."""


Launch = Callable[..., "Run"]
"""The fixture ``launch``."""


class Run:
    """A run in ``folder``. config: None for the default. server: whose forks its processes are;
    without it they are started anew, as a user's are. begin: see Server.launch."""

    def __init__(
        self,
        config: Path | None,
        folder: Path,
        server: Server | None = None,
        schedulers: int = 1,
        begin: str = "",
        cwd: Path = ROOT,
    ):
        self.config, self.folder, self.server = config, folder, server
        self.begin, self.cwd = begin, cwd
        self.homes = [shards.folder(folder, number) for number in range(schedulers)]
        self.out = folder.with_name(f"{folder.name}.out")
        self.launches = 0
        self.launcher: Launcher | subprocess.Popen[bytes]

    def launch(self, words: str = "", *more: str) -> None:
        """Start coppice launch. words: arguments; more: those that have spaces."""
        config = [] if self.config is None else ["--config", str(self.config)]
        self._start(*config, "--run-folder", str(self.folder), *words.split(), *more)

    def resume(self, *arguments: str) -> None:
        self._start("--resume", str(self.folder), *arguments)

    def _start(self, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        if self.config is not None:
            environment["COPPICE_CACHE"] = str(self.config.parent / "cache")
        self.launches += 1
        with self.out.open("ab") as out:
            self._said = out.tell()
            if self.server is not None:
                self.launcher = self.server.launch(
                    arguments, self.cwd, environment, out, self.begin
                )
                return
            self.launcher = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, *arguments],
                cwd=self.cwd, env=environment, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        with self.out.open("rb") as out:
            out.seek(self._said)
            return out.read().decode(errors="replace")

    def version(self) -> int:
        """The newest version that every scheduler has a record of."""
        return min(map(self._version, self.homes))

    def _version(self, home: Path) -> int:
        with contextlib.suppress(OSError), (home / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(ValueError):
                    values = json.loads(line)
                    if UPDATE in values:
                        return int(values["version"])
        return 0

    def pids(self) -> dict[str, int]:
        """The processes of this launch by name, the launcher among them."""
        launched = record.read(self.folder)
        ours = launched is not None and launched.pid == self.launcher.pid
        members = launched.members if launched is not None and ours else {}
        return {name: m.pid for name, m in members.items()} | {"launcher": self.launcher.pid}

    def alive(self, folder: Path | None = None) -> list[str]:
        """The command lines of living processes that name the run's folder, or another one."""
        lines = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if f"{folder or self.folder}/" in f"{line} ".replace(" ", "/ "):
                    lines.append(line)
        return lines

    def wait(
        self, condition: Callable[[], Any], awaited: str, patience_s: float = PATIENCE_S
    ) -> None:
        """Wait until ``condition`` holds. Raises Lost at the end of launcher or patience."""
        end = time.monotonic() + patience_s
        while not condition():
            if (status := self.launcher.poll()) is not None:
                self._lost(f"the run ended with status {status} before {awaited}")
            if time.monotonic() > end:
                self._lost(f"{awaited} did not come within {patience_s:.0f} s")
            time.sleep(_LOOK_S)

    def left(self, pids: Iterable[int]) -> list[str]:
        """The shared memory of processes, and the run's own living ones. torch's manager unlinks
        its segments some seconds after an end."""
        segments = [n for n in os.listdir("/dev/shm") if any(f"_{pid}_" in n for pid in pids)]
        return [*segments, *(f"process {line}" for line in self.alive())]

    def _lost(self, what: str) -> NoReturn:
        raise Lost(f"{what}:\n{self.said()[-5000:]}") from None

    def moved(self, updates: int = 1) -> None:
        mark = self.version() + updates
        self.wait(lambda: self.version() >= mark, f"version {mark}")

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for the launcher's end and for that of its processes. Return its exit status."""
        try:
            status = self.launcher.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._lost(f"the launcher did not end within {patience_s:.0f} s")
        end = time.monotonic() + 60
        while left := self.alive():
            if time.monotonic() > end:
                raise Lost(f"processes outlive the launcher: {left}")
            time.sleep(_LOOK_S)
        return status

    def finish(self, status: int = 0) -> str:
        if (ended := self.ended()) != status:
            self._lost(f"status {ended}, expected {status}")
        return self.said()

    def killed_and_resumed(self) -> None:
        self.moved()
        self.kill_all()
        self.resume()
        self.finish()

    def kill_all(self) -> None:
        """Kill the launcher, with which the system kills all others, and wait for the end."""
        self.launcher.send_signal(signal.SIGKILL)
        self.ended()

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pids()[name], number)

    def close(self) -> None:
        if self.launches:
            self.launcher.kill()
            self.launcher.wait()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def records(self) -> list[dict[str, float]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def trained(self) -> list[dict[str, float]]:
        """The records of updates that had a gradient."""
        return [record for record in self.records() if "learner/grad_norm" in record]

    def journal(self) -> Journal:
        return Journal(self.folder / "journal.sqlite", readonly=True)

    def trees(self, where: str = "split='train'") -> list[Tree]:
        journal = self.journal()
        return [journal.tree(row) for row in journal.trees(where)]

    def groups(self) -> list[list[Turn]]:
        """The turns of every group that was trained, in the order of the trees."""
        journal = self.journal()
        rows = journal.trees("split='train'")
        return [journal.turns(group) for row in rows for group, _ in journal.groups(row.id)]

    def check(
        self, updates: int = UPDATES, questions: int = QUESTIONS, learns: bool = True
    ) -> None:
        """Every task and group once, all updates done. learns: each had something to learn."""
        names: set[str] = set().union(*self.records())
        assert [name for name in sorted(names) if declaration(name) is None] == []
        journal = self.journal()
        rows = journal.trees("split='train'")
        assert [row.position for row in rows] == list(range(updates * questions))
        assert {row.status for row in rows} == {"closed"}
        groups = [pair for row in rows for pair in journal.groups(row.id)]
        assert len(dict(groups)) == len(groups)
        versions = [{version for _, version in journal.groups(row.id)} for row in rows]
        assert all(len(of_tree) == 1 for of_tree in versions)
        trained = sorted(version or 0 for (version,) in versions)
        assert trained == [v for v in range(1, updates + 1) for _ in range(questions)]
        assert frontier.read(self.folder, updates).groups() == dict(groups)
        norms = {record["version"]: record["learner/grad_norm"] for record in self.trained()}
        assert not learns or set(norms) == set(range(1, updates + 1))
        assert not learns or min(norms.values()) > 0
