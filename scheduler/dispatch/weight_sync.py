"""Give every actor the newest weights, and prove that all actors hold the same ones."""

import asyncio
import sys
from collections import Counter

import msgspec

from coppice.scheduler.dispatch.calls import Worker
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.dispatch.residency import Residency
from coppice.scheduler.telemetry import alerts
from coppice.wire.faults import Fault, InfrastructureFault
from coppice.wire.messages import LoadRequest, LoadResult
from coppice.wire.published import Weights

LOAD_S = 1200.0
"""Longer than an engine's own timeouts for loading, so that its own error arrives first."""


class Versions(msgspec.Struct):
    """The policy versions of the ready actors: at least ``proven``, at most ``newest``."""

    proven: int = 0
    newest: int = sys.maxsize


class WeightSync:
    """Gives weights and compares proofs. An actor that cannot prove the newest weights is sent
    away; its process restarts and joins again. counts: receives the count "failed_loads"."""

    def __init__(self, dispatcher: Dispatcher, residency: Residency, counts: Counter[str]):
        self.dispatcher, self.residency, self.counts = dispatcher, residency, counts
        self.weights, self.versions = Weights(), Versions(newest=0)
        self._common = ""  # the most common proof of the newest weights
        self._settled = asyncio.Event()  # set while that proof is known
        self._settled.set()

    async def everywhere(self, weights: Weights) -> None:
        """Give ``weights`` to all ready actors, and drop those that do not prove them."""
        self.weights, self.versions.newest = weights, weights.version
        self._settled.clear()
        try:
            actors = self.dispatcher.workers("load")
            proofs = await asyncio.gather(*(self._proven(actor) for actor in actors))
            # the most frequent one, the first on a tie; engines without a proof have no say
            self._common = common = max(filter(None, proofs), key=proofs.count, default="")
        finally:
            self._settled.set()
        for actor, proof in zip(actors, proofs, strict=True):
            if proof and proof != common:
                self._drop(actor, _differs(proof, common))
        self.versions.proven = weights.version
        if not self.dispatcher.workers("generate"):
            alerts.say(f"no actor holds policy version {weights.version}: waiting for one to join")

    async def to(self, actor: Worker) -> None:
        """Give a joining actor the newest weights. Raises Fault without their proof."""
        held, proof = 0, ""
        while held != self.weights.version:  # a newer version may come while one is being loaded
            weights = self.weights
            proof, held = await self._give(actor, weights), weights.version
            await self._settled.wait()
        if proof and self._common and proof != self._common:
            raise InfrastructureFault(_differs(proof, self._common))
        self._common = self._common or proof

    async def _proven(self, actor: Worker) -> str:
        """Give an actor the newest weights. Returns its proof, "" if it has none or was dropped."""
        try:
            return await self._give(actor, self.weights)
        except Fault as fault:
            self._drop(actor, str(fault))
            return ""

    async def _give(self, actor: Worker, weights: Weights) -> str:
        request = LoadRequest(weights.version, weights.path, weights.digest)
        loaded: LoadResult = await self.dispatcher.call(
            "load", request, deadline=LOAD_S, worker=actor.name
        )
        if (loaded.version, loaded.digest) != (weights.version, weights.digest):
            raise InfrastructureFault(
                f"answered version {loaded.version}, digest {loaded.digest[:16]}, expected version"
                f" {weights.version}, digest {weights.digest[:16]}"
            )
        self.residency.emptied(actor.name, weights.version)
        return loaded.proof

    def _drop(self, actor: Worker, reason: str) -> None:
        version = self.weights.version
        what = f"did not take policy version {version} and is dropped"
        alerts.say(f"actor {actor.name} {what}: {reason}")
        self.counts["failed_loads"] += 1
        self.dispatcher.roster.remove(actor, f"weights of version {version} were not proven")


def _differs(proof: str, common: str) -> str:
    return f"its weights have checksum {proof[:16]}, most have {common[:16]}"
