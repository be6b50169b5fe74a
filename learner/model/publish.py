"""A version's weights as a folder of safetensors with a digest. The folder appears only when
complete, and every actor checks the digest.

Whole weights are gathered over the ranks in the number type in which they are served, a bucket at a
time, and threads write and hash them. In bfloat16 most versions hold only what changed since the
one before: every rank writes the changes of its own rows, and nothing is gathered.
"""

import contextlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from coppice.common import vision
from coppice.common.atomic import draft_of, drafted, write_whole
from coppice.common.deltas import Delta, mapped
from coppice.common.frontier import runs
from coppice.common.jsonl import readable
from coppice.learner.config import LearnerConfig
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import own_rows, whole
from coppice.learner.model.weight_server import WeightServer, grouped
from coppice.wire import digest, published
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import FILES, Manifest, Memory, Weights

_PIECE = 2**24
"""The number of 64-bit words that are summed at a time."""
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}

_Hashed = tuple[str, str, tuple[int, ...], str]
"""A tensor for ``digest.total``."""


class Publisher:
    """Publishes the policy's versions; every rank has one. server: rank 0 also serves whole weights
    from memory. Adapters are always files. max_staleness: the scheduler's, whose evaluations may be
    max_staleness + 1 versions behind."""

    def __init__(
        self, policy: TreeModel, run: Path, config: LearnerConfig,
        server: WeightServer | None = None, max_staleness: int = 0,
    ):  # fmt: skip
        self.policy, self.ranks, self.run, self.server = policy, policy.ranks, run, server
        self.config, self.first = config, self.ranks.rank == 0
        self.file, self.keep = config.publish != "memory", max(config.keep, max_staleness + 2)
        self._last: tuple[int, str] | None = None
        """The newest version and, on rank 0, its digest."""
        self._changes = 0
        """Versions of changes since the newest whole one."""
        self._held: dict[str, torch.Tensor] = {}
        """This rank's rows of the newest version, flat, with which the next is compared."""
        if not policy.lora:
            trained, compute = policy.trained().items(), policy.compute
            hollow = {n: torch.empty(p.shape, dtype=compute, device="meta") for n, p in trained}
            self._like = self._stored(hollow)
            """The weights as a model folder names them: transformers joins experts and renames."""
            alone = {name for key, one in hollow.items() for name in self._stored({key: one})}
            one_by_one = alone == self._like.keys()
            self._groups = grouped(hollow) if one_by_one else [list(hollow)]
            plain = set(map(vision.stored, hollow)) == self._like.keys()
            narrow = compute == torch.bfloat16
            self._compares = self.file and narrow and plain and config.whole_every > 1

    def publish(self, version: int, trained: dict[int, int] | None = None) -> Weights | None:
        """Write ``RUN/weights/vNNNNNN``; folders go that are neither among the newest ``keep`` nor
        needed by one of them. Every sharded rank must call this. Rank 0 returns what it has
        published. trained: see ``announce``."""
        folder = self.run / "weights" / f"v{version:06d}"
        if not self.first and not self.ranks.sharded:
            return None
        theirs = contextlib.nullcontext(draft_of(folder, alone=True))
        with drafted(folder, replace=True, alone=True) if self.first else theirs as draft:
            if self.ranks.sharded:
                self.ranks.barrier()  # rank 0 has made the folder
            manifest = (self._adapter if self.policy.lora else self._full)(version, draft)
            if self.first:
                manifest.write(draft)
        self._last = version, manifest.digest
        if not self.first:
            return None
        result = Weights(version, str(folder), manifest.digest)
        announce(self.run, result, trained)
        self._retire(folder)
        return result

    def _adapter(self, version: int, folder: Path) -> Manifest:
        tensors, proof = self.policy.gathered(keep=self.first), ""
        if self.first:
            settings = self.policy.model.peft_config["default"].to_dict()
            # PEFT also names layers that it excluded
            adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
            settings["target_modules"] = sorted(adapted)
            text = json.dumps(settings, default=str, indent=1)
            (folder / "adapter_config.json").write_text(text)
            tensors = {vision.stored(n.replace(".default", "")): p for n, p in tensors.items()}
            save_file(tensors, folder / FILES["lora"], metadata={"format": "pt"})
            proof = digest.safetensors_file(folder / FILES["lora"])
        return Manifest(version, "lora", proof)

    def _full(self, version: int, folder: Path) -> Manifest:
        previous, delta = self._last, self._compared() if self._compares else Delta()
        moved = torch.tensor(float(len(delta)), device=self.ranks.device)
        anywhere = self.ranks.largest(moved) if self.ranks.sharded else len(delta)
        self._changes += 1
        due = not self._compares or (self._changes >= self.config.whole_every and anywhere)
        if previous is None or due:
            self._changes = 0
            proof, memory = self._streamed(version, folder / FILES["full"] if self.file else None)
            return Manifest(version, "full", proof, self.file, memory)
        if len(delta):
            delta.write(folder / f"delta-{self.ranks.rank:05d}.safetensors")
        if self.ranks.sharded:
            self.ranks.barrier()
        # without a change the digest stays, as it would with whole weights
        proof = published.following(previous[1], folder) if self.first else ""
        both = self.config.publish == "both"
        memory = self._streamed(version, None)[1] if both else None
        return Manifest(version, "full", proof, True, memory, previous)

    def _compared(self) -> Delta:
        """Return what changed in this rank's rows, and hold the new ones."""
        delta, before, self._held = Delta(), self._held, {}
        for name, parameter in self.policy.trained().items():
            rows, row = own_rows(parameter)
            new = self._held[name] = rows.to(self.policy.compute, copy=True).flatten()
            copies = self.ranks.shards if isinstance(parameter, DTensor) else 1
            if self._last and self.ranks.rank < copies and len(new):
                delta.add(vision.stored(name), before.pop(name), new, row * (len(new) // len(rows)))
        return delta

    def _streamed(self, version: int, path: Path | None) -> tuple[str, Memory | None]:
        """Gather all weights a bucket at a time into a file, the server's memory or both. Returns
        the digest and the manifest's entry, on rank 0."""
        trained, hashed, flat = self.policy.trained(), list[_Hashed](), None
        if path is not None and self.first:
            _blank(path, self._like)
            flat = mapped(path)

        def parts() -> Iterator[dict[str, torch.Tensor]]:
            for names in self._groups:
                own = {n: whole(trained[n].detach().to(self.policy.compute)) for n in names}
                if self.first:
                    tensors = self._stored(own)
                    hashed.extend(_filled(flat, tensors) if flat else sums(tensors))
                    yield tensors

        if self.server is not None:
            memory = self.server.offer(version, parts())
            return digest.total(hashed), memory
        deque(parts(), maxlen=0)
        return digest.total(hashed), None

    def _stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return revert_weight_conversion(self.policy.causal, tensors)

    def _retire(self, newest: Path) -> None:
        """Remove old versions, and newer ones: a step back to an older checkpoint undid those."""
        versions = sorted(newest.parent.glob("v??????"))
        needed = set([one for one in versions if one <= newest][-self.keep :])
        for kept in list(needed):
            with contextlib.suppress(InfrastructureFault):  # of what a crash took back
                needed |= {link for link, _ in published.chain(kept)}
        for old in set(versions) - needed:
            shutil.rmtree(old, ignore_errors=True)


def publish(policy: TreeModel, version: int, run: Path, keep: int) -> Weights:
    """Publish one version as a file, with one rank."""
    result = Publisher(policy, run, LearnerConfig(keep=keep)).publish(version)
    assert result is not None
    return result


def _blank(path: Path, like: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file with room for tensors. Raises OSError if the disk has none."""
    header, end = dict[str, object](), 0
    for name, one in like.items():
        offsets = end, end + one.nbytes
        header[name] = {"dtype": _TYPES[one.dtype], "shape": one.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        file.truncate(8 + len(text) + end)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)


def _filled(flat: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> Iterator[_Hashed]:
    """Copy tensors to their places in a file. Yields their hashes."""

    def put(name: str, one: torch.Tensor) -> _Hashed:
        flat[name].copy_(one.detach().flatten())
        data = memoryview(flat[name].view(torch.uint8).numpy())
        return name, _TYPES[one.dtype], tuple(one.shape), digest.sha([data])

    with ThreadPoolExecutor(digest.THREADS) as threads:
        yield from threads.map(put, *zip(*tensors.items(), strict=True))


def sums(tensors: dict[str, torch.Tensor]) -> list[_Hashed]:
    """Return weighted sums of each tensor's bits, computed on its device. Their ``digest.total``
    identifies weights that are in no file, but unlike a file's it does not prevent forgery."""
    found = []
    for name, one in tensors.items():
        data = one.detach().flatten().view(torch.uint8)
        # always some padding, so that the words are a copy, which begins where words may
        words = torch.nn.functional.pad(data, (0, 8 - len(data) % 8)).view(torch.int64)
        odd = torch.arange(1, 2 * min(len(words), _PIECE), 2, device=words.device)
        parts = [(piece * odd[: len(piece)]).sum() for piece in words.split(_PIECE)]
        values = str(torch.stack(parts).tolist())
        found.append((name, _TYPES[one.dtype], tuple(one.shape), values))
    return found


class _Announced(Weights, frozen=True):
    """newest: the newest version of all starts, from which a resume may have gone back."""

    newest: int = 0


def announced(run: Path) -> int:
    """Return the newest version of which ``RUN/learner.json`` told in any start, 0 if there is none
    that can be read."""
    said = readable(run / "learner.json", _Announced)
    return max(said.version, said.newest) if said is not None else 0


def announce(run: Path, weights: Weights, trained: dict[int, int] | None = None) -> None:
    """Write ``RUN/learner.json``, which a scheduler reads when it starts. trained: the version of
    each group trained after the newest checkpoint, whose trees are admitted no second time."""
    newest = max(weights.version, announced(run))
    said = msgspec.structs.asdict(weights) | {"trained": runs(trained or {}), "newest": newest}
    write_whole(run / "learner.json", said)
