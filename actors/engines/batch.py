"""Continuous batching over a radix cache: prompts are prefilled once for all their samples and
children, in chunks beside the samples that decode."""

import collections
import time
from typing import Any

import numpy as np
import torch

from coppice.actors.config import ActorsConfig
from coppice.actors.engines import attend, decoder
from coppice.actors.engines.admission import Admission
from coppice.actors.engines.memory import KVMemory, Stretch
from coppice.actors.engines.samples import ActiveRequest, Pictures, Running, check_room
from coppice.common.routing import Routers
from coppice.wire.messages import GenerateRequest


class RadixBatch:
    """The requests of an engine whose model has full attention. counts: the engine's counters."""

    def __init__(
        self, model: Any, config: ActorsConfig, longest: int, counts: collections.Counter[str],
        pictures: Pictures | None,
    ):  # fmt: skip
        settings = model.config.get_text_config()
        shape = (settings.num_hidden_layers, 2, *decoder.kv_heads(settings))
        token = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.memory = KVMemory(token, int(config.kv_cache_gib * 2**30), longest)
        self._device, self._pictures, self._running = model.device, pictures, 0
        self.admission = Admission(self.memory, config.max_batch, config.prefill_tokens, counts)
        self.decoder = decoder.decoder(model, longest)
        self._head = decoder.Head(model)
        self.products = [*self.decoder.products, self._head.product]
        self._routers = Routers(model)

    def __bool__(self) -> bool:
        return bool(self.admission) or self._running > 0

    def check(self, request: GenerateRequest) -> None:
        """Raise DataFault if a request would not fit even alone."""
        prompt, most = len(request.tokens), request.sampling.max_tokens
        check_room(request, self.memory.needed(prompt, request.n, most), self.memory.budget)

    def add(self, active: ActiveRequest) -> None:
        """Take a request, which waits for its place."""
        self.admission.waiting.append(active)

    def running(self) -> list[Running]:
        """Return the running samples in the order of their rows."""
        return [tail.owner for shelf in self.memory.tails.values() for tail in shelf.held]

    def step(self, version: int) -> tuple[list[Running], torch.Tensor | None]:
        """Run one forward over decoding rows and chunks. Return the samples that get a token, and
        their logits [samples, vocabulary]."""
        self.admission.admit(version)
        chunks = self.admission.chunks()
        decoding = self.running()
        hidden = self.forward(decoding, chunks) if decoding or chunks else None
        for running in decoding:
            running.tail.length += 1
        ends = dict[Stretch, int]()
        for row, chunk in enumerate(chunks, len(decoding)):
            chunk.prefix.length += chunk.count
            ends[chunk.prefix] = row
        rows = [hidden[: len(decoding)]] if hidden is not None and decoding else []
        copies = [1] * len(decoding)
        for active in self.admission.ready():
            if active.ending is None:
                assert hidden is not None
                active.ending = hidden[ends[active.prefix]].clone()
            rows.append(active.ending[None])
            copies.append(active.request.n)
            decoding += self._branch(active, version)
        if not rows:
            return decoding, None
        logits = self._head.logits(torch.cat(rows))
        if len(decoding) > len(logits):
            logits = logits.repeat_interleave(torch.tensor(copies, device=logits.device), 0)
        return decoding, logits

    def forward(self, decoding: list[Running], chunks: list[attend.Chunk]) -> torch.Tensor:
        """Return last hidden states [rows, hidden]: of decoding samples, then of each chunk's last
        token."""
        shelves = [shelf for shelf in self.memory.tails.values() if shelf.held]
        plan = attend.AttentionPlan(shelves, chunks)
        tokens: list[Any] = [np.array([r.tokens[-1] for r in decoding], np.int64)]
        positions = [np.array([r.position for r in decoding], np.int64)]
        for chunk in chunks:
            start, end = chunk.prefix.length, chunk.prefix.length + chunk.count
            tokens.append(chunk.prefix.owner.prompt[start:end])
            positions.append(chunk.prefix.owner.where(start, end))
        if any(part.ndim > 1 for part in positions):
            positions = [np.broadcast_to(part, (3, part.shape[-1])) for part in positions]
        joined = [np.concatenate(parts, -1) for parts in (tokens, positions)]
        ids, where = (torch.from_numpy(part).to(self._device) for part in joined)
        features = self._pictures.features(chunks) if self._pictures is not None else None
        hidden = self.decoder.forward(ids, where, plan, features)
        owners = [chunk.prefix.owner for chunk in chunks]
        if self._routers and any(one.routed for one in [*owners, *(r.owner for r in decoding)]):
            rows, first = self._routers.rows(), len(decoding)
            for running, row in zip(decoding, rows, strict=False):
                running.experts += [row] if running.owner.routed else []
            for owner, chunk in zip(owners, chunks, strict=True):
                owner.experts += [rows[first : first + chunk.count]] if owner.routed else []
                first += chunk.count
        return hidden

    def _branch(self, active: ActiveRequest, version: int) -> list[Running]:
        """Keep the prompt in the cache and start the request's samples."""
        # keys and values of an older version must not enter the new version's cache
        if active.version == version:
            self.memory.keep(active.prompt, active.prefix.view, active.ending)
        active.clock["decode"] = time.monotonic()
        branches: list[Running] = []
        for index in range(active.request.n):
            tail = active.tails.put(None)
            tail.owner = Running(active, index, tail)
            branches.append(tail.owner)
        self._running += len(branches)
        return branches

    def leave(self, running: Running, keep: bool) -> None:
        """Free a sample's row, and its request's after the last. keep: cache keys and values."""
        active = running.owner
        if keep:
            context = running.context()
            self.memory.keep(context, running.read)
            self.admission.ideal.insert(context)
        running.tail.shelf.drop(running.tail)
        self._running -= 1
        self.admission.places += 1
        if not active.left:
            active.prefix.shelf.drop(active.prefix)

    def remove(self, active: ActiveRequest) -> None:
        """Forget a request of which no sample runs yet."""
        self.admission.remove(active)

    def clear(self) -> None:
        """Free the memory of all requests after a failure."""
        self.admission.clear()
        self.memory.clear()
        self._running = 0

    def forget(self) -> None:
        self.memory.cache.clear()
        self.admission.ideal.clear()

    def stats(self) -> dict[str, float]:
        """Return gauges. kv_cache_bytes: without running requests."""
        cache = self.memory.cache
        return {
            "evicted_tokens": cache.evicted_tokens,
            "running": self._running,
            "kv_cache_bytes": cache.bytes,
            "kv_running_bytes": self.memory.running_bytes,
            "kv_capacity_tokens": cache.budget // self.memory.token.nbytes,
        }
