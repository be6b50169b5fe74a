"""A scripted learner that follows ``learner.main`` and keeps its own record of what it trained."""

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from coppice.common import frontier
from coppice.wire.messages import Closed, Error, Request, Result, Trained, TrainGroup, TreeClosed
from tests.simulation.network import Network
from tests.simulation.peers import Peer, mislabelled

PATIENCE = 12
"""How often a group may come without its nodes: one message comes several times."""


class Update(msgspec.Struct, frozen=True):
    """trees: with their groups. replaced: groups of replaced trees. sampled: versions of tokens."""

    version: int
    trees: dict[int, list[int]]
    replaced: list[int]
    sampled: set[int]


class Learner(Peer):
    """record: the updates whose weights are in force. every: updates between two checkpoints."""

    def __init__(self, network: Network, rng: random.Random, run: Path, questions: int, every: int):
        super().__init__(network, rng, "learner", ["train", "close"], 4096)
        self.run, self.questions, self.every = run, questions, every
        self.record: list[Update] = []
        self.version, self.owners = 0, dict[int, int]()
        self.on_update: Callable[[], None] = lambda: None

    def born(self) -> None:
        """Restore the newest checkpoint, and announce its weights."""
        files = sorted((self.run / "checkpoints").glob("v??????/state.json"))
        newest = files[-1].read_bytes() if files else b"{}"
        state = msgspec.json.decode(newest, type=frontier.Frontier)
        self.version = self.durable = state.version
        self.record = [update for update in self.record if update.version <= state.version]
        self.trained = state.groups()
        self.restored = state.version
        self.owners = {group: self.owners[group] for group in self.trained}
        self.lacking = Counter[int]()
        self.groups: dict[int, TrainGroup] = {}
        self.nodes: dict[int, dict[int, int]] = {}
        self.closed: dict[int, TreeClosed] = {}
        self.done: set[int] = set()
        self.waiting: dict[int, list[int]] = {}
        self.busy = False
        self._announce()

    def accepted(self, header: Request, body: TrainGroup | TreeClosed) -> None:
        if isinstance(body, TrainGroup):
            if (tree := self.owners.setdefault(body.id, body.tree)) != body.tree:
                self.violated(f"group {body.id} is of tree {tree} and of tree {body.tree}")
            if wrong := [node.id for node in body.nodes if mislabelled(node)]:
                self.violated(f"tree {body.tree}: the tokens of nodes {wrong} have other versions")
        if self._strikes(self.manners.error):
            self.reply(header.id, Error(header.id, "infrastructure", "an injected fault"))
        elif isinstance(body, TreeClosed):
            if body.tree not in self.done:
                self.closed.setdefault(body.tree, body)
            self.reply(header.id, Result(header.id), Closed())
        elif body.id in self.trained and body.id not in self.waiting:
            self.reply(header.id, Result(header.id), self._trained(self.trained[body.id]))
        elif not self._whole(body):
            reason = f"group {body.id}: nodes must be resent"
            self.lacking[body.id] += 1
            if self.lacking[body.id] > PATIENCE:
                self.violated(f"group {body.id} comes without its nodes again and again")
            self.reply(header.id, Error(header.id, "infrastructure", reason))
        else:
            if body.id not in self.trained:
                self.groups[body.id] = body
            self.waiting.setdefault(body.id, []).append(header.id)
        self._update_if_ready()

    def _whole(self, group: TrainGroup) -> bool:
        if self._strikes(self.manners.forget):
            self.nodes.pop(group.tree, None)
        nodes = self.nodes.setdefault(group.tree, {})
        nodes.update((node.id, node.parent) for node in group.nodes)
        for turn in group.turns:
            at = turn.node
            while at >= 0 and at in nodes:
                at = nodes[at]
            if at >= 0:
                return False
        return True

    def _weights(self, version: int) -> str:
        return str(self.run / "weights" / f"v{version}")

    def _trained(self, version: int) -> Trained:
        if version <= self.restored:  # of an earlier start: there are no weights to load any more
            return Trained(version, "", "", {}, [])
        return Trained(version, self._weights(version), f"digest {version}", {}, [])

    def _ready(self, replaced: bool) -> list[TreeClosed]:
        here = self.groups.keys() | self.trained.keys()
        whole = [tree for tree in self.closed.values() if here >= set(tree.groups)]
        whole = [tree for tree in whole if tree.replaced == replaced]
        return sorted(whole, key=lambda tree: tree.tree)

    def _update_if_ready(self) -> None:
        batch = self._ready(replaced=False)[: self.questions]
        if self.busy or len(batch) < self.questions:
            return
        self.busy = True
        replaced = [group for tree in self._ready(replaced=True) for group in self._take(tree)]
        sampled = self._sampled(batch)
        trees = {tree.tree: self._take(tree) for tree in batch}
        update = Update(self.version + 1, trees, replaced, sampled)
        for group in itertools.chain(replaced, *trees.values()):
            self.trained[group] = update.version
        seconds = self.rng.random() * 2 * self.manners.seconds["train"]
        self.later(seconds, lambda: self._publish(update))

    def _sampled(self, batch: list[TreeClosed]) -> set[int]:
        held = self.groups
        groups = [held[group] for tree in batch for group in tree.groups if group in held]
        versions = [node.versions for group in groups for node in group.nodes]
        return {int(v) for of_node in versions if of_node is not None for v in of_node}

    def _take(self, tree: TreeClosed) -> list[int]:
        del self.closed[tree.tree]
        self.done.add(tree.tree)
        self.nodes.pop(tree.tree, None)
        return [group for group in tree.groups if self.groups.pop(group, None) is not None]

    def _publish(self, update: Update) -> None:
        self.version = update.version
        self.record.append(update)
        self.note("update", self.name, update)
        self._announce()
        self.on_update()
        seconds = self.rng.random() * self.manners.seconds["train"]
        self.later(seconds, lambda: self._checkpoint(update))

    def _announce(self) -> None:
        path, digest = self._weights(self.version), f"digest {self.version}"
        weights = {"version": self.version, "path": path, "digest": digest}
        trained = {group: v for group, v in self.trained.items() if v > self.durable}
        said = weights | {"trained": frontier.runs(trained)}
        (self.run / "learner.json").write_bytes(msgspec.json.encode(said))

    def _checkpoint(self, update: Update) -> None:
        if self.version - self.durable >= self.every:
            folder = self.run / "checkpoints" / f"v{self.version:06d}"
            folder.mkdir(parents=True)
            state = frontier.Frontier(self.version, frontier.runs(self.trained))
            (folder / "state.json").write_bytes(msgspec.json.encode(state))
            self.durable = self.version
            for old in sorted(folder.parent.glob("v??????"))[:-1]:
                shutil.rmtree(old)
        self.later(self.rng.random() * 0.1, lambda: self._answer_all(update))

    def _answer_all(self, update: Update) -> None:
        for group in itertools.chain(*update.trees.values(), update.replaced):
            for number in self.waiting.pop(group, []):
                self.reply(number, Result(number), self._trained(update.version))
        self.busy = False
        self._update_if_ready()
