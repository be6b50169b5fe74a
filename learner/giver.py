"""The newest weights, given out of the learner's memory to inference engines: as handles of shared memory, or by broadcasts.

Engines ask through a rendezvous (a TCPStore of torch.distributed): ``asked`` counts the asks, ``ask/N`` and ``answer/N`` are JSON, ``done/N`` ends one.
Each ask is served by a thread of its own from a snapshot, so a slow engine delays neither training nor the others; every wait has
an end. The store and the broadcasts have no authentication: bind them to the loopback or to a network of the cluster's own.
"""

import base64
import contextlib
import io
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing import reductions

from wire.published import Memory

log = logging.getLogger("learner.giver")

BUCKET_BYTES = 512 * 2**20
_LOOK_S = 1.0

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
    """Owns the rendezvous. ``offer`` replaces what is given; an ask for another version is answered with an error."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 300.0):
        self.host, self.timeout = host, timedelta(seconds=timeout_s)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        self.address = f"{host}:{self._store.port}"
        self._snapshot: Snapshot | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="giver", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> Memory:
        """Give this version from now on; returns what its manifest says of it."""
        self._snapshot = snapshot
        device = snapshot.buckets[0][0][1].device
        return Memory(self.address, socket.gethostname(), device.type, _gpu(device))

    def close(self) -> None:
        """Answer no more."""
        self._closing.set()
        self._thread.join()

    # ------------------------------------------------------------------------------------------ asks

    def _listen(self) -> None:
        store = self._client()
        number = 1
        while not self._closing.is_set():
            try:
                store.wait([f"ask/{number}"], timedelta(seconds=_LOOK_S))
            except RuntimeError:  # nobody asked
                continue
            threading.Thread(target=self._serve, args=(number,), name=f"giver-{number}", daemon=True).start()
            number += 1

    def _client(self) -> TCPStore:
        return TCPStore(self.host, self._store.port, is_master=False, timeout=self.timeout)

    def _serve(self, number: int) -> None:
        """Answer one ask. Whatever fails is the asker's to know; training goes on."""
        store = self._client()
        try:
            asked = json.loads(store.get(f"ask/{number}"))
            snapshot = self._snapshot
            if snapshot is None or snapshot.version != asked["version"]:
                now = "nothing" if snapshot is None else f"version {snapshot.version}"
                raise LookupError(f"asked for version {asked['version']}, gives {now}")
            give = {"tensor": self._hand_over, "distributed": self._broadcast}[asked["transport"]]
            give(store, number, asked, snapshot)
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            log.warning("ask %d failed: %s: %s", number, type(error).__name__, error)
            with contextlib.suppress(RuntimeError):
                store.set(f"answer/{number}", json.dumps({"error": f"{type(error).__name__}: {error}"}))
        finally:
            with contextlib.suppress(RuntimeError):
                store.delete_key(f"ask/{number}")

    def _hand_over(self, store: TCPStore, number: int, asked: dict[str, Any], snapshot: Snapshot) -> None:
        """Handles to the snapshot's own memory, which is kept until the asker is done."""
        buckets = [
            described(bucket) | {"payloads": [handles(bucket) for _ in range(int(asked["ranks"]))]}
            for bucket in snapshot.buckets
        ]
        store.set(f"answer/{number}", json.dumps({"buckets": buckets}))
        store.wait([f"done/{number}"], self.timeout)

    def _broadcast(self, store: TCPStore, number: int, asked: dict[str, Any], snapshot: Snapshot) -> None:
        """Rank 0 of a group with the asker's ranks; a bucket is one broadcast of bytes."""
        meeting = TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
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
            store.wait([f"done/{number}"], self.timeout)
        finally:
            group.shutdown()


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
    options = torch.distributed.BroadcastOptions()
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
