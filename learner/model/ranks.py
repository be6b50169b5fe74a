"""The communication between the ranks of one learner: only tensors, never pickled objects. FSDP2
shards the parameters. With sharding, every forward and backward is a collective, so each rank must
make equally many (learner/update/passes.py ensures this).
"""

import contextlib
import logging
import math
import os
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from coppice.common.hardware import torch_device

log = logging.getLogger("learner.ranks")

Sharding = Literal["replicate", "fsdp", "hybrid"]


class Ranks:
    """This process among the learner's ranks, until ``close``. With one rank every operation is the
    identity. shards: neighbouring ranks that hold one copy of the model together. computing: the
    first so many ranks share out the forwards, 0 for all. Of sharded ranks none is without any."""

    def __init__(
        self, timeout_s: float, sharding: Sharding = "replicate", shard_ranks: int = 0,
        computing: int = 0,
    ):  # fmt: skip
        cuda, timeout = torch_device() == "cuda", timedelta(seconds=timeout_s)
        os.environ.setdefault("ACCELERATE_USE_CPU", "false" if cuda else "true")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            _meet("cuda:nccl,cpu:gloo" if cuda else "gloo", timeout)
        self.accelerator = Accelerator(cpu=not cuda)
        self.rank, self.count = self.accelerator.process_index, self.accelerator.num_processes
        self.device = str(self.accelerator.device)
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or self.count)  # the ranks of this machine
        hybrid = shard_ranks or here
        self.shards = {"replicate": 1, "fsdp": self.count, "hybrid": hybrid}[sharding]
        most = self.largest(torch.tensor(self.shards, device=self.device))
        if self.count % self.shards or most != self.shards:
            raise ValueError(
                f"learner.sharding = 'hybrid': {self.shards} of {self.count} ranks share a copy of"
                " the model: expected a divisor, the same on every machine; set learner.shard_ranks"
            )
        self.sharded = self.shards > 1
        self.computing = self.count if self.sharded else computing or self.count
        self._mesh = self._grid(timeout) if 1 < self.shards < self.count else None
        self._lookout = Lookout(self.rank, self.count) if self.count > 1 else None

    def _grid(self, timeout: timedelta) -> DeviceMesh:
        """Return the ranks as rows of ``shards`` neighbours. torch's own groups of a mesh would
        wait for another time than the run's."""
        grid = torch.arange(self.count).view(-1, self.shards)
        subgroups = dist.new_subgroups_by_enumeration
        groups: Any = [subgroups(lines.tolist(), timeout=timeout)[0] for lines in (grid.T, grid)]
        kind, names = self.accelerator.device.type, ("replicate", "shard")
        return DeviceMesh.from_group(groups, kind, mesh=grid, mesh_dim_names=names)

    def place(self, module: torch.nn.Module, layer: str, compute: torch.dtype) -> torch.nn.Module:
        """Return the module on this rank's device, with its parameters sharded over ``shards``
        ranks.

        layer: class name of the decoder layers; each layer's parameters are gathered together.
        Gradients are summed over all ranks, because an update's weights are global. With bfloat16
        compute, parameters are gathered in bfloat16 and gradients are reduced in float32. Autocast,
        not FSDP2, narrows the activations, so that the self-check can compute in float32.
        """
        if not self.sharded:
            return module.to(self.device)
        policy = MixedPrecisionPolicy()
        if compute == torch.bfloat16:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        layers = [part for part in module.modules() if type(part).__name__ == layer]
        for part in [*layers, module]:
            sharded: FSDPModule = fully_shard(part, mesh=self._mesh, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # a vision tower has no gradient on a rank whose micro-batch has no picture
            sharded.set_reduce_scatter_unused_params(True)
        return module

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank. Raises RuntimeError if a rank is gone or silent. On
        the CPU, as a rank that waits on a GPU would take its time from an engine there."""
        if self.count == 1:
            assert payload is not None
            return payload
        size = torch.tensor([len(payload) if payload is not None else 0])
        dist.broadcast(size, 0)
        room = bytearray(int(size) if payload is None else payload)
        buffer = torch.frombuffer(room, dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def add_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum every gradient over the ranks; with FSDP2 this is done already."""
        if self.sharded:
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self.count == 1:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        parts = flat.split([p.numel() for p in parameters])
        for p, gradient in zip(parameters, parts, strict=True):
            p.grad = gradient.view_as(p)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values elementwise over the ranks, possibly in place. Returns the sum on the CPU."""
        if self.count > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values.cpu()

    def largest(self, value: torch.Tensor) -> float:
        """Return the largest value over the ranks. NaN counts as infinite."""
        value = value.detach().float().nan_to_num(nan=math.inf, posinf=math.inf)
        if self.count > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group, which every rank does after its last operation. A rank that failed must
        not: its end tells the others."""
        if self._lookout is not None:
            self._lookout.close()
            dist.destroy_process_group()


class Lookout:
    """Ends this process within seconds after another rank died, where NCCL would wait for the
    collective's timeout. The ranks are a ring over gloo: each sends a word a second to the one
    before it. The one that hears no more tells the dead rank's number to the others."""

    silent_s = 120.0
    """After this silence a rank is taken for dead: its machine stands still or is cut off. The end
    of a process is noticed at once."""
    _ALIVE, _BYE = -1, -2

    def __init__(self, rank: int, count: int):
        self._before, self._after, self._count = (rank - 1) % count, (rank + 1) % count, count
        # longer, because gloo breaks all connections at a timeout, also those that carry the news
        self._limit = timedelta(seconds=10 * self.silent_s)
        self._ring: Any = dist.new_group(backend="gloo", timeout=self._limit)
        self._closing, self._heard, self._at = threading.Event(), self._ALIVE, time.monotonic()
        self._threads = [
            threading.Thread(target=part, name="lookout", daemon=True)
            for part in (self._speak, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Take leave of both neighbours, who do the same."""
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _speak(self) -> None:
        while not self._closing.wait(1.0):
            if self._heard != self._BYE and time.monotonic() - self._at > self.silent_s:
                self._end(self._after)
            self._say(self._ALIVE)
        self._say(self._BYE)

    def _listen(self) -> None:
        word = torch.tensor([self._ALIVE])
        while self._heard == self._ALIVE:
            try:
                self._ring.recv([word], self._after, 0).wait(self._limit)
            except RuntimeError:
                word.fill_(self._after)
            self._heard, self._at = int(word), time.monotonic()
        if self._heard != self._BYE:
            self._end(self._heard)

    def _end(self, dead: int) -> None:
        log.critical(
            "rank %d of %d is dead: this one ends too; the log of rank %d says why",
            dead, self._count, dead,
        )  # fmt: skip
        threading.Thread(target=self._say, args=(dead,), daemon=True).start()
        time.sleep(0.5)  # to whoever still listens
        os._exit(1)

    def _say(self, word: int) -> None:
        # that the one before is dead, the ring will tell: it may have ended for another's death
        with contextlib.suppress(RuntimeError):
            self._ring.send([torch.tensor([word])], self._before, 0).wait(self._limit)


def _meet(backend: str, timeout: timedelta) -> None:
    """Open the group: at COPPICE_RANKS, a file that all ranks of this machine share, or at
    MASTER_ADDR and MASTER_PORT."""
    if backend.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not (file := os.environ.get("COPPICE_RANKS")):
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = dist.FileStore(file, count)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complete parameter or moment, detached. For a sharded tensor this is a collective,
    which every rank must call."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's rows of a tensor (a view) and the first row's index. FSDP2 cuts dimension
    0 as torch.chunk does."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    last = mesh.ndim - 1  # this dimension of the mesh shards, one before it replicates
    rows = -(-tensor.shape[0] // mesh.size(last))
    return tensor.to_local(), min(mesh.get_local_rank(last) * rows, tensor.shape[0])
