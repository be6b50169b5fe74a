"""Games of libraries that cannot live in this process, because their licence, the versions that
they pin or what they evaluate forbid it: another process plays them (docs/environments.md). It gets
the seed and all actions with every step, so it can be killed at any time."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from coppice.actors.environments.others.mutable import Mutable
from coppice.actors.environments.others.worker import GAMES, ActionRefused, Turned
from coppice.common.numbers import Count, Positive
from coppice.common.process import die_with, without_secrets
from coppice.wire.faults import DataFault, InfrastructureFault

WORKER = Path(__file__).with_name("worker.py")
LARGEST = 16 << 20
"""The most bytes of an answer."""


class OtherPython(Mutable):
    """python: its path, "" for the one of this process. game, arguments: a name in ``worker.GAMES``
    or "module:Class", and what it is made with. rules: what the policy is told beside what the game
    shows. timeout_s: for an answer, that of the first step with the
    start of the process. processes: that play at the same time; a task's states are all with
    one. actions: that a warm start may play, by default those that the game lists."""

    name = "other_python"

    def __init__(
        self,
        game: str,
        python: str = "",
        arguments: dict[str, Any] | None = None,
        rules: str = "You play a text game.",
        horizon: Count = 100,
        timeout_s: Positive = 120.0,
        processes: Count = 1,
        actions: list[str] | None = None,
    ):
        super().__init__(horizon, actions or ())
        self.rules = rules
        python = python or sys.executable
        command = [python, str(WORKER), game, json.dumps(arguments or {})]
        if ":" not in game and game not in GAMES:
            raise ValueError(f"game = {game!r}: expected one of {sorted(GAMES)}, or module:Class")
        try:
            trial = subprocess.run(
                command, input=b"", capture_output=True, timeout=timeout_s, env=_environment()
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"python = {python!r}, game = {game!r}: {error}") from None
        if trial.returncode:
            last = trial.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ValueError(f"game = {game!r}, arguments = {arguments or {}}, in {python}: {last}")
        self._failed: set[tuple[Any, ...]] = set()
        self._children = [_Child(command, timeout_s) for _ in range(processes)]
        if not actions and hasattr(GAMES.get(game), "listed"):
            self.replies = lambda state: self._listed

    @functools.cached_property
    def _listed(self) -> list[str]:
        command, request = self._children[0].command, b"[0, null, [], null]"
        told = subprocess.check_output(command, input=request, env=_environment())
        return [f"<action>{one}</action>" for one in json.loads(told).get("listed", [])]

    async def ask(self, seed: int, actions: tuple[str, ...], action: str | None) -> Turned:
        request, child = (seed, actions, action), self._children[seed % len(self._children)]
        place = f"of seed {seed} after {len(actions)} actions"
        try:
            answer = await child.ask(*request)
        except InfrastructureFault as fault:
            if request not in self._failed:
                self._failed.add(request)
                raise
            if action is not None:
                raise ActionRefused("the game gave no answer, twice") from None
            raise DataFault(f"the game {place} gave no answer, twice: {fault}") from None
        if "refused" in answer:
            raise ActionRefused(answer["refused"])
        if "failed" in answer:
            raise DataFault(f"the game {place} raised {answer['failed']}")
        return Turned(**answer)

    async def close(self) -> None:
        await asyncio.gather(*(child.close() for child in self._children))


class _Child:
    """A process that answers one request at a time. It is started when it is needed, also after it
    has died."""

    def __init__(self, command: list[str], timeout_s: float):
        self.command, self.timeout_s = command, timeout_s
        self._one, self._number = asyncio.Lock(), 0
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, *request: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises InfrastructureFault if the process dies or
        takes too long, which ends it."""
        async with self._one:
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await self._exchanged(request)
            except (OSError, TimeoutError, ValueError) as error:
                await self.close()
                late = isinstance(error, TimeoutError)
                reason = f"no answer in {self.timeout_s:g} s" if late else error
                python, _, game = self.command[:3]
                raise InfrastructureFault(f"{game} in {python}: {reason}") from None

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _exchanged(self, request: tuple[Any, ...]) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LARGEST,
                env=_environment(),
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        self._number += 1
        stdin.write(json.dumps([self._number, *request]).encode() + b"\n")
        await stdin.drain()
        while line := await stdout.readline():
            answer = json.loads(line)
            # the one before it may have been asked by a step that was cancelled
            if answer.pop("id") == self._number:
                return answer
        raise ConnectionResetError("the process has died; its own words are in the log")


def _environment() -> dict[str, str]:
    """This process's environment without the keys of the user's services. Sets of texts have one
    order in all processes, so that a replay is one."""
    return without_secrets() | {"PYTHONHASHSEED": "0"}
