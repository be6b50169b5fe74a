"""What the ranks of one learner say to each other: tensors only, never pickled objects. Accelerate opens the group."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs


class Ranks:
    """This process among the learner's ranks; with one rank every operation is the identity."""

    def __init__(self, timeout_s: float):
        cuda = torch.cuda.is_available()
        os.environ.setdefault("ACCELERATE_USE_CPU", "false" if cuda else "true")
        wait = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
        self.accelerator = Accelerator(cpu=not cuda, kwargs_handlers=[wait])
        self.rank, self.count = self.accelerator.process_index, self.accelerator.num_processes
        self.device = str(self.accelerator.device)

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank. Raises RuntimeError when a rank is gone or silent for the timeout."""
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
        """Sum every gradient over the ranks. Weights are global, so the sum is the update's gradient."""
        flat = torch.cat([p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in parameters])
        if self.count > 1:
            dist.all_reduce(flat)
        start = 0
        for p in parameters:
            p.grad = flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def greatest(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks."""
        if self.count > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()
