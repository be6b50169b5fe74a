"""Serves the newest weights from the learner's memory to inference engines, as handles of shared
memory or by broadcasts.

Engines ask through a rendezvous (a TCPStore of torch.distributed): ``asked`` counts the asks,
``ask/N`` and ``answer/N`` are JSON, and ``done/N`` ends an ask. A thread per ask serves it from a
snapshot, so a slow engine delays neither training nor other engines; every wait has a timeout. Asks
and answers are sealed with a token from the manifest, which only the run's owner can read;
broadcasts have no authentication. Rendezvous and broadcasts listen only on ``host``, which must be
the loopback or a private network of the cluster.
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

from coppice.wire.published import Memory, opened, prefix, sealed

log = logging.getLogger("learner.weight_server")

BUCKET_BYTES = 512 * 2**20
_LOOK_S = 0.02
_LOST_S = 10.0
_sharing = threading.Lock()
"""Guards torch's sharing strategy, which is global in the process."""

Named = list[tuple[str, torch.Tensor]]


class Snapshot:
    """The tensors of one version by name, in buckets of at most ``bucket_bytes`` (a larger tensor
    has a bucket of its own)."""

    def __init__(
        self, version: int, tensors: dict[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES
    ):
        self.version, size = version, 0
        self.buckets: list[Named] = [[]]
        for name, tensor in tensors.items():
            if self.buckets[-1] and size + tensor.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append((name, tensor.detach().contiguous()))
            size += tensor.nbytes


class WeightServer:
    """Owns the rendezvous from construction until ``close``. It serves the two newest offered
    versions and answers any other ask with an error."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 300.0):
        self.host, self.timeout = host, timedelta(seconds=timeout_s)
        if host == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of broadcasts between CPUs
        else:
            log.warning("anyone who reaches %s can disturb weights: keep it a closed network", host)
        self.token = secrets.token_urlsafe(24)
        self._meeting = bound_store(host, self.timeout)
        self.address = f"{host}:{self._meeting.port}"
        self._snapshots: list[Snapshot] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="weights", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> Memory:
        """Serve this version from now on, and the one before, which engines may still ask for.
        Returns the entry for the manifest."""
        self._snapshots = [*self._snapshots[-1:], snapshot]
        device = snapshot.buckets[0][0][1].device
        return Memory(self.address, socket.gethostname(), device.type, _gpu(device), self.token)

    def close(self) -> None:
        """Stop serving. Must be called before exit, or a thread that waits in the store would abort
        the process when the interpreter ends."""
        self._closing.set()
        self._thread.join()

    def _listen(self) -> None:
        store, number, missing = self._client(), 1, 0
        while not self._closing.wait(_LOOK_S):
            while store.check([f"ask/{number}"]):
                threading.Thread(target=self._serve, args=(number,), daemon=True).start()
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
            snapshot = next((s for s in self._snapshots if s.version == ask["version"]), None)
            if snapshot is None:
                now = ", ".join(str(s.version) for s in self._snapshots) or "none"
                raise LookupError(f"asked for version {ask['version']}, gives {now}")
            serve = {"tensor": self._hand_over, "distributed": self._broadcast}[ask["transport"]]
            serve(store, number, ask, snapshot)
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

    def _hand_over(self, store: Any, number: int, ask: dict[str, Any], snapshot: Snapshot) -> None:
        """Answer with handles to the snapshot's own memory, which stays until the asker is done."""
        ranks = range(int(ask["ranks"]))
        buckets = [
            described(bucket) | {"payloads": [handles(bucket) for _ in ranks]}
            for bucket in snapshot.buckets
        ]
        self._answer(store, number, {"buckets": buckets})
        self._ended(store, number)

    def _broadcast(self, store: Any, number: int, ask: dict[str, Any], snapshot: Snapshot) -> None:
        """Join a group with the asker's ranks as rank 0, and broadcast each bucket as bytes."""
        meeting = bound_store(self.host, self.timeout)
        buckets = [described(bucket) for bucket in snapshot.buckets]
        answer = {"address": self.host, "port": meeting.port, "buckets": buckets}
        self._answer(store, number, answer)
        size = 1 + int(ask["ranks"])
        group = joined(meeting, ask["group"], ask["backend"], size, self.timeout)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            for bucket in snapshot.buckets:
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


def described(bucket: Named) -> dict[str, Any]:
    """Return the names, number types (in torch's spelling), shapes and bytes of a bucket."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "bytes": sum(tensor.nbytes for _, tensor in bucket),
    }


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


class _ByUuid:
    """A CUDA tensor whose handle names its device by UUID, because the other process may number its
    devices differently."""

    _DEVICE = 6
    """The index of the device among the arguments of ``rebuild_cuda_tensor``."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return rebuild, (*arguments[: self._DEVICE], uuid, *arguments[self._DEVICE + 1 :])


def handles(bucket: Named) -> str:
    """Return the input of SGLang's update_weights_from_tensor, base64 of a pickle of names and
    handles. Only one rank may use it, once."""
    buffer = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(buffer).dump([(name, _ByUuid(t) if t.is_cuda else t) for name, t in bucket])
    return base64.b64encode(buffer.getvalue()).decode()


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by name, since unrelated processes cannot pass file descriptors."""
    with _sharing:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    shown = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return shown[device.index] if shown else str(device.index)
