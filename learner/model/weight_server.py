"""Broadcasts the newest weights from the learner's memory to inference engines.

Engines ask through a rendezvous (a TCPStore of torch.distributed): ``asked`` counts the asks,
``ask/N`` and ``answer/N`` are JSON, and ``done/N`` ends an ask. Each ask has a thread, so a slow
engine delays neither training nor other engines. Asks and answers are sealed with a token from the
manifest, which only the run's owner can read; broadcasts have no authentication. Both listen only
on ``host``, which must be the loopback or a private network of the cluster.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from coppice.common.deltas import changed
from coppice.learner.config import BUCKET_BYTES
from coppice.wire.published import Memory, opened, prefix, sealed

log = logging.getLogger("learner.weight_server")

_LOOK_S = 0.02
_LOST_S = 10.0


def grouped(tensors: dict[str, torch.Tensor], most_bytes: int = BUCKET_BYTES) -> list[list[str]]:
    """Return the names of what is gathered and sent at once. A larger tensor is alone. The weights
    of one attention stay together: SGLang joins two of DeepSeek's, and drops one that comes alone.
    """
    groups, size, last = [[]], 0, ""
    for name, tensor in tensors.items():
        before, _, inside = name.partition("_attn.")
        other, last = not inside or before != last, before
        if groups[-1] and other and size + tensor.nbytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    return groups


class _Bucket:
    """The bytes of some tensors in one version, and what makes them those of the version before:
    only what changed, if that is smaller."""

    def __init__(self, version: int, tensors: dict[str, torch.Tensor], before: "_Bucket | None"):
        self.version = version
        self.told = {
            "names": list(tensors),
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
            "shapes": [list(one.shape) for one in tensors.values()],
        }
        parts = [one.detach().flatten().view(torch.uint8) for one in tensors.values()]
        self.flat = torch.cat(parts)  # a copy: training goes on while engines read
        self._before, self._places = -1 if before is None else before.version, None
        if before is not None:
            self._values = before.flat.view(torch.int16)
            places = changed(self._values, self.flat.view(torch.int16))
            if 5 * len(places) < len(self._values):
                self._places, self._values = places, self._values[places]

    def at(self, version: int) -> torch.Tensor:
        """Return the bytes of this version or the one before."""
        if version == self.version:
            return self.flat
        if version != self._before:
            raise LookupError(f"version {version} is not given any more")
        if self._places is None:
            return self._values.view(torch.uint8)
        flat = self.flat.clone()
        flat.view(torch.int16)[self._places] = self._values
        return flat


class WeightServer:
    """Owns the rendezvous from construction until ``close``. It serves the two newest offered
    versions and answers any other ask with an error."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 300.0):
        self.host, self.timeout = host, timedelta(seconds=timeout_s)
        # of the groups from here on: a broadcast that fails raises, and does not end the process
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        if host == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of broadcasts between CPUs
        else:
            log.warning("anyone who reaches %s can disturb broadcasts: keep it closed", host)
        self.token = secrets.token_urlsafe(24)
        self._meeting = bound_store(host, self.timeout)
        self.address = f"{host}:{self._meeting.port}"
        self._buckets: list[_Bucket] = []
        self._versions: list[int] = []
        """The newest version and the one before, ascending."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="weights", daemon=True)
        self._thread.start()

    def offer(self, version: int, parts: Iterable[dict[str, torch.Tensor]]) -> Memory:
        """Serve this version from now on, and the one before, which engines may still ask for.
        Returns the entry for the manifest. parts: what is sent at once, the same tensors for every
        version."""
        self._versions = self._versions[-1:]
        for number, tensors in enumerate(parts):
            before = self._buckets[number] if number < len(self._buckets) else None
            # An ask under way has a list of its own, and a bucket never changes.
            self._buckets[number : number + 1] = [_Bucket(version, tensors, before)]
        self._versions = [*self._versions, version]
        device = self._buckets[0].flat.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # broadcasts have another stream
        return Memory(self.address, device.type, self.token)

    def close(self) -> None:
        """Stop serving. Must be called before exit, or a thread that waits in the store would abort
        the process when the interpreter ends."""
        self._closing.set()
        self._thread.join()

    def _listen(self) -> None:
        store, number, missing = self._client(), 1, 0
        while not self._closing.wait(_LOOK_S):
            while store.check([f"ask/{number}"]):
                args, name = (number,), f"weights-{number}"
                threading.Thread(target=self._serve, args=args, name=name, daemon=True).start()
                number, missing = number + 1, 0
            missing = missing + 1 if store.add("asked", 0) >= number else 0
            if missing * _LOOK_S > _LOST_S:  # the asker was killed after it had taken the number
                number, missing = number + 1, 0

    def _client(self) -> Any:
        store = TCPStore(self.host, self._meeting.port, is_master=False, timeout=self.timeout)
        return PrefixStore(prefix(self.token), store)

    def _serve(self, number: int) -> None:
        """Answer one ask. A failure is reported to the asker, and training goes on."""
        store = self._client()
        try:
            ask = json.loads(opened(self.token, f"ask/{number}", store.get(f"ask/{number}")))
            self._broadcast(store, number, ask, self._given(ask["version"]))
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            log.warning("ask %d failed: %s: %s", number, type(error).__name__, error)
            with contextlib.suppress(RuntimeError):
                self._answer(store, number, {"error": f"{type(error).__name__}: {error}"})
                self._ended(store, number)
        finally:
            with contextlib.suppress(RuntimeError):
                for key in ("ask", "answer", "done"):
                    store.delete_key(f"{key}/{number}")

    def _given(self, version: int) -> list[_Bucket]:
        if version not in self._versions:
            now = ", ".join(map(str, self._versions)) or "none"
            raise LookupError(f"asked for version {version}, gives {now}")
        return list(self._buckets)

    def _answer(self, store: Any, number: int, answer: dict[str, Any]) -> None:
        key = f"answer/{number}"
        store.set(key, sealed(self.token, key, json.dumps(answer)))

    def _ended(self, store: Any, number: int) -> None:
        """Wait until the asker is done, at most for the timeout."""
        end = time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < end and not store.check([f"done/{number}"]):
            if self._closing.wait(_LOOK_S):
                return

    def _broadcast(
        self, store: Any, number: int, ask: dict[str, Any], buckets: list[_Bucket]
    ) -> None:
        """Join a group with the asker's ranks as rank 0, and broadcast each bucket as bytes."""
        meeting = bound_store(self.host, self.timeout)
        told = [bucket.told for bucket in buckets]
        answer = {"address": self.host, "port": meeting.port, "buckets": told}
        self._answer(store, number, answer)
        size = 1 + int(ask["ranks"])
        group = joined(meeting, ask["group"], ask["backend"], size, self.timeout)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            device = buckets[0].flat.device
            own = torch.cuda.Stream(device) if device.type == "cuda" else None
            with torch.cuda.stream(own):  # not behind training's kernels
                for bucket in buckets:
                    flat = bucket.at(int(ask["version"]))
                    if not group.broadcast([flat], options).wait(self.timeout):
                        what = f"no broadcast of {flat.nbytes} bytes within {self.timeout}"
                        raise RuntimeError(what)
                    if flat.is_cuda:
                        torch.cuda.current_stream().synchronize()
            self._ended(store, number)
        finally:
            dist.destroy_process_group(group)


def bound_store(host: str, timeout: timedelta) -> Any:
    """Return a rendezvous that listens only on ``host``; by default torch's listens everywhere."""
    listening = socket.socket()
    listening.bind((host, 0))
    listening.listen(128)
    address, file = (host, listening.getsockname()[1]), listening.detach()
    return TCPStore(
        *address, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=file
    )


def joined(store: Any, name: str, backend: str, size: int, timeout: timedelta) -> Any:
    """Return a second process group, as rank 0, under the keys of init_process_group. The other
    ranks join by SGLang's init_weights_update_group."""
    from torch.distributed import distributed_c10d as c10d

    # This helper also works in a process without a default group (a learner with one rank).
    place: Any = PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), place, group_name=c10d.GroupName(name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
