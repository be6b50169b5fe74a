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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from coppice.wire.published import Memory, opened, prefix, sealed

log = logging.getLogger("learner.weight_server")

BUCKET_BYTES = 512 * 2**20
_LOOK_S = 0.02
_LOST_S = 10.0

_Buckets = list[list[tuple[str, torch.Tensor]]]


class WeightServer:
    """Owns the rendezvous from construction until ``close``. It serves the two newest offered
    versions and answers any other ask with an error."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 300.0):
        self.host, self.timeout = host, timedelta(seconds=timeout_s)
        if host == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of broadcasts between CPUs
        else:
            log.warning("anyone who reaches %s can disturb broadcasts: keep it closed", host)
        self.token = secrets.token_urlsafe(24)
        self._meeting = bound_store(host, self.timeout)
        self.address = f"{host}:{self._meeting.port}"
        self._offered: dict[int, _Buckets] = {}
        """Tensors by name and bucket, of each version."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="weights", daemon=True)
        self._thread.start()

    def offer(
        self, version: int, tensors: dict[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES
    ) -> Memory:
        """Serve this version from now on, and the one before, which engines may still ask for.
        Returns the entry for the manifest. bucket_bytes: of what is sent at once; a larger tensor
        is sent alone."""
        buckets, size = _Buckets([[]]), 0
        for name, tensor in tensors.items():
            if buckets[-1] and size + tensor.nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append((name, tensor.detach().contiguous()))
            size += tensor.nbytes
        self._offered = dict([*self._offered.items()][-1:]) | {version: buckets}
        return Memory(self.address, buckets[0][0][1].device.type, self.token)

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
            offered = self._offered
            if ask["version"] not in offered:
                now = ", ".join(map(str, offered)) or "none"
                raise LookupError(f"asked for version {ask['version']}, gives {now}")
            self._broadcast(store, number, ask, offered[ask["version"]])
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            log.warning("ask %d failed: %s: %s", number, type(error).__name__, error)
            with contextlib.suppress(RuntimeError):
                self._answer(store, number, {"error": f"{type(error).__name__}: {error}"})
                self._ended(store, number)
        finally:
            with contextlib.suppress(RuntimeError):
                for key in ("ask", "answer", "done"):
                    store.delete_key(f"{key}/{number}")

    def _answer(self, store: Any, number: int, answer: dict[str, Any]) -> None:
        key = f"answer/{number}"
        store.set(key, sealed(self.token, key, json.dumps(answer)))

    def _ended(self, store: Any, number: int) -> None:
        """Wait until the asker is done, at most for the timeout."""
        end = time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < end and not store.check([f"done/{number}"]):
            if self._closing.wait(_LOOK_S):
                return

    def _broadcast(self, store: Any, number: int, ask: dict[str, Any], buckets: _Buckets) -> None:
        """Join a group with the asker's ranks as rank 0, and broadcast each bucket as bytes."""
        meeting = bound_store(self.host, self.timeout)
        told = [
            {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            for bucket in buckets
        ]
        answer = {"address": self.host, "port": meeting.port, "buckets": told}
        self._answer(store, number, answer)
        size = 1 + int(ask["ranks"])
        group = joined(meeting, ask["group"], ask["backend"], size, self.timeout)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            for bucket in buckets:
                flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
                if not group.broadcast([flat], options).wait(self.timeout):
                    raise RuntimeError(f"no broadcast of {flat.nbytes} bytes within {self.timeout}")
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
