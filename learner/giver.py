"""The newest weights, given out of the learner's memory to inference engines: as handles of shared memory, or by broadcasts.

Engines ask through a rendezvous (a TCPStore of torch.distributed): ``asked`` counts the asks, ``ask/N`` and ``answer/N`` are JSON, ``done/N`` ends one.
Each ask is served by a thread of its own from a snapshot, so a slow engine delays neither training nor the others; every wait has
an end. Keys begin with a token that the manifest tells, which only the run's owner can read; broadcasts have no authentication at
all. Both listen on ``host`` alone: the loopback, or a network of the cluster's own.
"""

import base64
import contextlib
import io
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing import reductions

from wire.published import Memory

log = logging.getLogger("learner.giver")

BUCKET_BYTES = 512 * 2**20
_LOOK_S = 0.02
_LOST_S = 10.0
_sharing = threading.Lock()
"""torch's sharing strategy is one for the whole process."""

Named = list[tuple[str, torch.Tensor]]


class Snapshot:
    """One version: its tensors by name, cut into buckets of at most BUCKET_BYTES (a larger tensor is alone)."""

    def __init__(self, version: int, tensors: dict[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES):
        self.version = version
        self.buckets: list[Named] = [[]]
        size = 0
        for name, tensor in tensors.items():
            if self.buckets[-1] and size + tensor.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append((name, tensor.detach().contiguous()))
            size += tensor.nbytes


class Giver:
    """Owns the rendezvous. The two newest versions are given; an ask for another one is answered with an error."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 300.0):
        self.host, self.timeout = host, timedelta(seconds=timeout_s)
        if host == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # where broadcasts between CPUs listen
        else:
            log.warning(
                "weights are given to whoever reaches %s and knows this run's token: keep that network closed", host
            )
        self.token = secrets.token_urlsafe(24)
        self._meeting = bound_store(host, self.timeout)
        self.address = f"{host}:{self._meeting.port}"
        self._snapshots: list[Snapshot] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="giver", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> Memory:
        """Give this version from now on, and the one before, which some engines may be about to take; what its manifest says of it."""
        self._snapshots = [*self._snapshots[-1:], snapshot]
        device = snapshot.buckets[0][0][1].device
        return Memory(self.address, socket.gethostname(), device.type, _gpu(device), self.token)

    def close(self) -> None:
        """Answer no more. To be called: a thread that waits in the store when the interpreter ends would abort the process."""
        self._closing.set()
        self._thread.join()

    # ------------------------------------------------------------------------------------------ asks

    def _listen(self) -> None:
        store, number, missing = self._client(), 1, 0
        while not self._closing.wait(_LOOK_S):
            while store.check([f"ask/{number}"]):
                threading.Thread(target=self._serve, args=(number,), name=f"giver-{number}", daemon=True).start()
                number, missing = number + 1, 0
            missing = missing + 1 if store.add("asked", 0) >= number else 0
            if missing * _LOOK_S > _LOST_S:  # its asker was killed after it took the number
                number, missing = number + 1, 0

    def _client(self) -> Any:
        made = TCPStore(self.host, self._meeting.port, is_master=False, timeout=self.timeout)
        return PrefixStore(self.token, made)

    def _serve(self, number: int) -> None:
        """Answer one ask. Whatever fails is the asker's to know; training goes on."""
        store = self._client()
        try:
            asked = json.loads(store.get(f"ask/{number}"))
            snapshot = next((s for s in self._snapshots if s.version == asked["version"]), None)
            if snapshot is None:
                now = ", ".join(str(s.version) for s in self._snapshots) or "none"
                raise LookupError(f"asked for version {asked['version']}, gives {now}")
            give = {"tensor": self._hand_over, "distributed": self._broadcast}[asked["transport"]]
            give(store, number, asked, snapshot)
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            log.warning("ask %d failed: %s: %s", number, type(error).__name__, error)
            with contextlib.suppress(RuntimeError):
                store.set(f"answer/{number}", json.dumps({"error": f"{type(error).__name__}: {error}"}))
                self._ended(store, number)
        finally:
            with contextlib.suppress(RuntimeError):
                for key in ("ask", "answer", "done"):
                    store.delete_key(f"{key}/{number}")

    def _ended(self, store: Any, number: int) -> None:
        """Wait until the asker is done, or too long."""
        end = time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < end and not self._closing.is_set() and not store.check([f"done/{number}"]):
            time.sleep(_LOOK_S)

    def _hand_over(self, store: Any, number: int, asked: dict[str, Any], snapshot: Snapshot) -> None:
        """Handles to the snapshot's own memory, which is kept until the asker is done."""
        buckets = [
            described(bucket) | {"payloads": [handles(bucket) for _ in range(int(asked["ranks"]))]}
            for bucket in snapshot.buckets
        ]
        store.set(f"answer/{number}", json.dumps({"buckets": buckets}))
        self._ended(store, number)

    def _broadcast(self, store: Any, number: int, asked: dict[str, Any], snapshot: Snapshot) -> None:
        """Rank 0 of a group with the asker's ranks; a bucket is one broadcast of bytes."""
        meeting = bound_store(self.host, self.timeout)
        told = {"address": self.host, "port": meeting.port, "buckets": [described(b) for b in snapshot.buckets]}
        store.set(f"answer/{number}", json.dumps(told))
        group = joined(meeting, asked["group"], asked["backend"], 1 + int(asked["ranks"]), self.timeout)
        try:
            for bucket in snapshot.buckets:
                flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
                if not group.broadcast([flat], _options()).wait(self.timeout):
                    raise RuntimeError(f"no broadcast of {flat.nbytes} bytes within {self.timeout}")
                if flat.is_cuda:
                    torch.cuda.current_stream().synchronize()
            self._ended(store, number)
        finally:
            dist.destroy_process_group(group)


def bound_store(host: str, timeout: timedelta) -> Any:
    """A rendezvous that listens on ``host`` only; torch's own choice would be every address of the machine."""
    listening = socket.socket()
    listening.bind((host, 0))
    listening.listen(128)
    port = listening.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )


def described(bucket: Named) -> dict[str, Any]:
    """Names, number types as torch spells them, shapes and bytes of a bucket."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "bytes": sum(tensor.nbytes for _, tensor in bucket),
    }


def joined(store: Any, name: str, backend: str, size: int, timeout: timedelta) -> Any:
    """A process group apart from the learner's own, as rank 0. The other ranks come through SGLang's init_weights_update_group.

    The keys in the store are those of ``torch.distributed.init_process_group``, which that side uses.
    """
    from torch.distributed import distributed_c10d as c10d

    # A process without a default group (one rank) may still make this one.
    place: Any = PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), place, group_name=c10d.GroupName(name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _options() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


# ---------------------------------------------------------------------------------------------- handles


class _ByUuid:
    """A CUDA tensor whose handle names its device by UUID: the other process may number its devices otherwise."""

    _DEVICE = 6
    """The device's place among the arguments of ``rebuild_cuda_tensor``."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, given = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return rebuild, (*given[: self._DEVICE], uuid, *given[self._DEVICE + 1 :])


def handles(bucket: Named) -> str:
    """What SGLang's update_weights_from_tensor takes: base64 of a pickle of names and handles, no tensor data. For one rank, once."""
    buffer = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(buffer).dump([(name, _ByUuid(t) if t.is_cuda else t) for name, t in bucket])
    return base64.b64encode(buffer.getvalue()).decode()


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """CPU memory is shared by name, since unrelated processes cannot pass file descriptors."""
    with _sharing:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)


def _gpu(device: torch.device) -> str:
    """The GPU as CUDA_VISIBLE_DEVICES names it."""
    if device.type != "cuda":
        return ""
    shown = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return shown[device.index] if shown else str(device.index)
