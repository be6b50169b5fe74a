"""Weights out of the learner's memory into one SGLang server, bucket by bucket, agreed on at the learner's rendezvous (``learner.giver``).

SGLang takes handles of shared memory as a pickle of its own making; it goes from the learner to the server, and nothing of ours reads it.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from datetime import timedelta
from typing import Any

from actors.config import SGLangConfig
from wire.faults import InfrastructureFault
from wire.published import Memory

log = logging.getLogger("actors.sglang")

_CLEANUP_S = 30.0
"""Of a call that puts a server in order after a failure: a longer wait would only hide the failure's cause."""


class Pull:
    """One server's share in an update: asked for while generation goes on, taken while it pauses."""

    def __init__(self, server: Any, talk: "Talk", ask: dict[str, Any], told: dict[str, Any], config: SGLangConfig):
        self.server, self.talk, self.ask, self.told, self.config = server, talk, ask, told, config

    @classmethod
    async def asked(cls, server: Any, chosen: str, version: int, memory: Memory, config: SGLangConfig) -> "Pull":
        """Ask the learner. Raises InfrastructureFault when it does not give this version."""
        facts = await server.facts()
        gpus = memory.device == facts.device == "cuda"
        ask = {"version": version, "transport": chosen, "ranks": facts.tp, "backend": "nccl" if gpus else "gloo"}
        ask |= {"group": f"coppice-{uuid.uuid4().hex[:12]}"}
        talk = await asyncio.to_thread(Talk, memory, config.update_timeout_s)
        return cls(server, talk, ask, await asyncio.to_thread(talk.ask, ask), config)

    async def take(self) -> int:
        """Move everything; bytes. Whatever fails, the server's session and group and the learner's share are given up."""
        try:
            await self._begin()
            for index, bucket in enumerate(self.told["buckets"]):
                await self._bucket(bucket, index == len(self.told["buckets"]) - 1)
            await self._call("/end_weight_update", {})
        except BaseException:
            await self._tidy("/end_weight_update", {})
            raise
        finally:
            await self.release()
            if self.ask["transport"] == "distributed":
                await self._tidy("/destroy_weights_update_group", {"group_name": self.ask["group"]})
        return sum(bucket["bytes"] for bucket in self.told["buckets"])

    async def release(self) -> None:
        """The learner may let go of what it holds for this."""
        await asyncio.to_thread(self.talk.done)

    async def _begin(self) -> None:
        if self.ask["transport"] == "distributed":
            await self._call("/init_weights_update_group", {
                "master_address": self.told["address"], "master_port": self.told["port"], "rank_offset": 1,
                "world_size": 1 + self.ask["ranks"], "group_name": self.ask["group"], "backend": self.ask["backend"],
            })  # fmt: skip
        try:
            await self._call("/begin_weight_update", {})
        except InfrastructureFault as fault:
            if "already open" not in str(fault):
                raise
            await self._call("/end_weight_update", {})  # of an update that was cut off
            await self._call("/begin_weight_update", {})

    async def _bucket(self, bucket: dict[str, Any], last: bool) -> None:
        body: dict[str, Any] = {"flush_cache": last and self.config.pause == "retract"}
        body |= {"weight_version": str(self.ask["version"])} if last else {}
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
        """A call that must not replace the failure which made it necessary."""
        try:
            await self.server.call(path, body, min(_CLEANUP_S, self.config.update_timeout_s))
        except InfrastructureFault as fault:
            log.warning("%s", fault)


class Talk:
    """One conversation with the learner's rendezvous. Blocking; every wait has an end."""

    def __init__(self, memory: Memory, timeout_s: float):
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.memory = memory
        host, _, port = memory.store.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(f"the learner's rendezvous {memory.store} cannot be reached: {error}") from None
        self._store = PrefixStore(memory.token, store)
        self._number = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The learner's answer. Raises InfrastructureFault when it gives another version by now, or does not answer."""
        try:
            self._number = self._store.add("asked", 1)
            self._store.set(f"ask/{self._number}", json.dumps(request))
            answer = json.loads(self._store.get(f"answer/{self._number}"))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(f"the learner at {self.memory.store} did not answer: {error}") from None
        if "error" in answer or not answer.get("buckets"):
            raise InfrastructureFault(f"the learner at {self.memory.store}: {answer.get('error', 'gives nothing')}")
        return answer

    def done(self) -> None:
        """The weights were taken, or the attempt is over."""
        with contextlib.suppress(RuntimeError):  # it may be gone, and holds nothing then
            self._store.set(f"done/{self._number}", "1")
