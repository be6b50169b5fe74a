"""Move weights from the learner's memory into one SGLang server, bucket by bucket, as agreed at the
learner's rendezvous (``learner.weight_server``).

SGLang takes handles of shared memory as a pickle that SGLang made. The pickle goes from the learner
to the server, and Coppice never reads it. An answer that is not sealed with the run's token is
refused, so nobody else can have a server read a pickle of theirs.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from datetime import timedelta
from typing import Any

from coppice.actors.config import SGLangConfig
from coppice.actors.engines.sglang_api import Facts
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import Memory, opened, prefix, sealed

log = logging.getLogger("actors.sglang")

_CLEANUP_S = 30.0
"""The limit of a call that cleans up a server after a failure. A longer wait would only delay the
report of the failure."""


class Pull:
    """One server's part of an update: ``asked`` while generation goes on, then ``take`` while it
    pauses, or ``release`` to give up."""

    def __init__(
        self,
        server: Any,
        talk: "Talk",
        ask: dict[str, Any],
        offer: dict[str, Any],
        config: SGLangConfig,
    ):
        self.server, self.talk, self.ask, self.offer, self.config = server, talk, ask, offer, config

    @classmethod
    async def asked(
        cls,
        server: Any,
        facts: Facts,
        chosen: str,
        version: int,
        memory: Memory,
        config: SGLangConfig,
    ) -> "Pull":
        """Ask the learner for a version. Raises InfrastructureFault when the learner does not offer
        it."""
        gpus = memory.device == facts.device == "cuda"
        ask = {
            "version": version,
            "transport": chosen,
            "ranks": facts.tp,
            "backend": "nccl" if gpus else "gloo",
        }
        ask |= {"group": f"coppice-{uuid.uuid4().hex[:12]}"}
        talk = await asyncio.to_thread(Talk, memory, config.update_timeout_s)
        return cls(server, talk, ask, await asyncio.to_thread(talk.ask, ask), config)

    async def take(self) -> int:
        """Move all weights and return their bytes. After a failure the server's session and group
        and the learner's offer are released."""
        try:
            await self._begin()
            for index, bucket in enumerate(self.offer["buckets"]):
                await self._bucket(bucket, index == len(self.offer["buckets"]) - 1)
            await self._call("/end_weight_update", {})
        except BaseException:
            await self._tidy("/end_weight_update", {})
            raise
        finally:
            await self.release()
            if self.ask["transport"] == "distributed":
                await self._tidy("/destroy_weights_update_group", {"group_name": self.ask["group"]})
        return sum(bucket["bytes"] for bucket in self.offer["buckets"])

    async def release(self) -> None:
        """Tell the learner that it may free what it holds for this pull."""
        await asyncio.to_thread(self.talk.done)

    async def _begin(self) -> None:
        if self.ask["transport"] == "distributed":
            await self._call("/init_weights_update_group", {
                "master_address": self.offer["address"], "master_port": self.offer["port"], "rank_offset": 1,
                "world_size": 1 + self.ask["ranks"], "group_name": self.ask["group"], "backend": self.ask["backend"],
            })  # fmt: skip
        try:
            await self._call("/begin_weight_update", {})
        except InfrastructureFault as fault:
            if "already open" not in str(fault):
                raise
            await self._call("/end_weight_update", {})  # ends an earlier update that was cut off
            await self._call("/begin_weight_update", {})

    async def _bucket(self, bucket: dict[str, Any], last: bool) -> None:
        body: dict[str, Any] = {"flush_cache": last and self.config.pause == "retract"}
        if self.ask["transport"] == "tensor":
            body["serialized_named_tensors"] = bucket["payloads"]
            await self._call("/update_weights_from_tensor", body)
            return
        body |= {name: bucket[name] for name in ("names", "dtypes", "shapes")}
        body |= {"group_name": self.ask["group"], "load_format": "flattened_bucket"}
        await self._call("/update_weights_from_distributed", body)

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        await self.server.call(path, body, self.config.update_timeout_s)

    async def _tidy(self, path: str, body: dict[str, Any]) -> None:
        """Make a call after a failure. If this call fails too, it is only logged, so that the first
        failure is the one reported."""
        try:
            await self.server.call(path, body, min(_CLEANUP_S, self.config.update_timeout_s))
        except InfrastructureFault as fault:
            log.warning("%s", fault)


class Talk:
    """One conversation with the learner's rendezvous: ``ask``, then ``done``. Its calls block, and
    every wait has a limit."""

    def __init__(self, memory: Memory, timeout_s: float):
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.memory = memory
        host, _, port = memory.store.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(
                f"the learner's rendezvous {memory.store} cannot be reached: {error}"
            ) from None
        self._store = PrefixStore(prefix(memory.token), store)
        self._number = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the learner's answer. Raises InfrastructureFault when the learner already offers
        another version, or does not answer."""
        try:
            self._number = self._store.add("asked", 1)
            ask, answered = f"ask/{self._number}", f"answer/{self._number}"
            self._store.set(ask, sealed(self.memory.token, ask, json.dumps(request)))
            answer = json.loads(opened(self.memory.token, answered, self._store.get(answered)))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(
                f"the learner at {self.memory.store} did not answer: {error}"
            ) from None
        if "error" in answer or not answer.get("buckets"):
            raise InfrastructureFault(
                f"the learner at {self.memory.store}: {answer.get('error', 'offers no weights')}"
            )
        return answer

    def done(self) -> None:
        """Tell the learner that the weights were taken or the attempt is over."""
        with contextlib.suppress(RuntimeError):  # a learner that is gone holds nothing
            self._store.set(f"done/{self._number}", "1")
