"""The communication between the ranks of one learner: only tensors, never pickled objects. The ranks of a run meet at a file of the run
folder; Accelerate opens the group otherwise and, if the parameters are sharded, applies FSDP2.

With sharding, every forward and backward is a collective, so each rank must make equally many (learner/passes.py ensures this).
"""

import math
import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

Sharding = Literal["replicate", "fsdp"]


class Ranks:
    """This process among the learner's ranks, from the opening of the group until ``close``. With one rank every operation is the identity."""

    def __init__(self, timeout_s: float, sharding: Sharding = "replicate"):
        cuda = torch.cuda.is_available()
        os.environ.setdefault("ACCELERATE_USE_CPU", "false" if cuda else "true")
        wait = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
        plugin = _plugin() if sharding == "fsdp" else None
        if file := os.environ.get("COPPICE_RANKS"):
            _meet(file, "cuda:nccl,cpu:gloo" if cuda else "gloo", timedelta(seconds=timeout_s))
        self.accelerator = Accelerator(cpu=not cuda, fsdp_plugin=plugin, kwargs_handlers=[wait])
        self.rank, self.count = self.accelerator.process_index, self.accelerator.num_processes
        self.device = str(self.accelerator.device)
        self.sharded = sharding == "fsdp" and self.count > 1
        if self.sharded and self.accelerator.distributed_type != DistributedType.FSDP:
            # Accelerate offers FSDP only on accelerators and would silently replicate on a CPU, although torch can shard there too.
            self.accelerator.state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin

    def place(self, module: torch.nn.Module, layer: str, compute: torch.dtype) -> torch.nn.Module:
        """Return the module on this rank's device. Its parameters are sharded over the ranks if ``sharding`` is "fsdp".

        layer: class name of the decoder layers; each layer's parameters are gathered together. Gradients are summed, not averaged, because
        an update's weights are global. With bfloat16 compute, parameters are gathered in bfloat16 and gradients are reduced in float32.
        Autocast, not FSDP2, narrows the activations, so that the self-check can compute in float32.
        """
        module = module.to(self.device)
        if not self.sharded:
            return module
        plugin: Any = self.accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = [layer]
        plugin.mixed_precision_policy = None
        if compute == torch.bfloat16:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, cast_forward_inputs=False
            )
        module = fsdp2_prepare_model(self.accelerator, module)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        return module

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank. Raises RuntimeError if a rank is gone or is silent for longer than the timeout."""
        if self.count == 1:
            assert payload is not None
            return payload
        size = torch.tensor([len(payload) if payload is not None else 0], device=self.device)
        dist.broadcast(size, 0)
        if payload is not None:
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        else:
            buffer = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    def add_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum every gradient over the ranks. Weights are global, so the sum is the update's gradient. With FSDP2 the sum is done already."""
        for p in parameters:
            if p.grad is None and not self.sharded:
                p.grad = torch.zeros_like(p)
        if self.sharded or self.count == 1:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        start = 0
        for p in parameters:
            p.grad = flat[start : start + p.numel()].view_as(p)
            start += p.numel()

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
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group. No operation may follow."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _meet(file: str, backend: str, timeout: timedelta) -> None:
    """Open the group at a file that all ranks of this machine share. Ranks on several machines meet at MASTER_ADDR and MASTER_PORT instead."""
    rank, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if backend.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = dist.FileStore(file, count)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)


def _plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=False,  # True would silently spoil tied weights inside a wrapper
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complete parameter or moment, detached, on the CPU. For a sharded tensor this is a collective, which every rank must call."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()
