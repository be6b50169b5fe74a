"""Broadcasts of weights out of the learner's memory into SGLang (NCCL, or gloo between CPUs), as
agreed at the learner's rendezvous (``learner.model.weight_server``).

An answer that is not sealed with the run's token is refused, so nobody else can have a server take
weights of theirs.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from datetime import timedelta
from typing import Any

from coppice.actors.engines.servers import Facts, Http
from coppice.actors.engines.weights import compare
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import Manifest, opened, prefix, sealed

log = logging.getLogger("actors.sglang")

_CLEANUP_S = 30.0
"""The limit of a call that cleans up after a failure. A longer wait would only delay the report."""


class Pull:
    """One server's part of an update: ``ask`` while it generates, then ``take`` or ``release``.
    Raises InfrastructureFault. ranks: of the server."""

    def __init__(self, server: Http, facts: Facts, manifest: Manifest, timeout_s: float):
        assert manifest.memory is not None
        self.server, self.memory, self.timeout_s = server, manifest.memory, timeout_s
        gpus = self.memory.device == facts.device == "cuda"
        self.request = {
            "version": manifest.version, "ranks": facts.tp, "backend": "nccl" if gpus else "gloo",
            "group": f"coppice-{uuid.uuid4().hex[:12]}",
        }  # fmt: skip
        self.offer: dict[str, Any] = {}
        self._store: Any = None
        self._number = 0

    def ask(self, shapes: dict[str, list[int]]) -> None:
        """Ask the learner to offer the version, which blocks. shapes: of the model's weights;
        raises ValueError if others are offered, which SGLang would skip without a word."""
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore

        (host, _, port), token = self.memory.store.rpartition(":"), self.memory.token
        limit = timedelta(seconds=self.timeout_s)
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=limit)
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(
                f"the learner's rendezvous {self.memory.store} cannot be reached: {error}"
            ) from None
        self._store = PrefixStore(prefix(token), store)
        try:
            self._number = self._store.add("asked", 1)
            question, reply = f"ask/{self._number}", f"answer/{self._number}"
            self._store.set(question, sealed(token, question, json.dumps(self.request)))
            self.offer = json.loads(opened(token, reply, self._store.get(reply)))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(
                f"the learner at {self.memory.store} did not answer: {error}"
            ) from None
        if "error" in self.offer or not self.offer.get("buckets"):
            reason = self.offer.get("error", "offers no weights")
            raise InfrastructureFault(f"the learner at {self.memory.store}: {reason}")
        buckets = self.offer["buckets"]
        pairs = (pair for one in buckets for pair in zip(one["names"], one["shapes"], strict=True))
        compare(self.memory.store, dict(pairs), shapes)

    async def take(self) -> None:
        """Move all weights. Releases everything, also after a failure."""
        buckets, group = self.offer["buckets"], {"group_name": self.request["group"]}
        try:
            await self._call("/init_weights_update_group", group | {
                "master_address": self.offer["address"], "master_port": self.offer["port"],
                "world_size": 1 + self.request["ranks"], "rank_offset": 1,
                "backend": self.request["backend"],
            })  # fmt: skip
            try:
                await self._call("/begin_weight_update", {})
            except InfrastructureFault as fault:
                if "already open" not in str(fault):
                    raise
                await self._call("/end_weight_update", {})  # ends an update that was cut off
                await self._call("/begin_weight_update", {})
            for index, bucket in enumerate(buckets):
                body = {name: bucket[name] for name in ("names", "dtypes", "shapes")}
                body |= {"load_format": "flattened_bucket"} | group
                body |= {"flush_cache": index == len(buckets) - 1}
                await self._call("/update_weights_from_distributed", body)
            await self._call("/end_weight_update", {})
        except BaseException:
            await self._clean_up("/end_weight_update", {})
            raise
        finally:
            await self.release()
            await self._clean_up("/destroy_weights_update_group", group)

    async def release(self) -> None:
        """Tell the learner that it may free what it holds for this pull."""
        if self._number:
            with contextlib.suppress(RuntimeError):  # a learner that is gone holds nothing
                await asyncio.to_thread(self._store.set, f"done/{self._number}", "1")
            self._number = 0

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        await self.server.call(path, body, self.timeout_s)

    async def _clean_up(self, path: str, body: dict[str, Any]) -> None:
        """Only log a failure of this call, so that the first failure is the one reported."""
        try:
            await self.server.call(path, body, min(_CLEANUP_S, self.timeout_s))
        except InfrastructureFault as fault:
            log.warning("%s", fault)
