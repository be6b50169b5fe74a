"""Grows the trees of some updates by the real strategy, with a made-up policy, environment and
judge, and counts what actors and learner get to do. Caches are the scheduler's own model of a
prefix cache, emptied by each update; the learner's own code packs and cuts the paths."""

import asyncio
import itertools
import math
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments import registry
from coppice.actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition
from coppice.common import loop
from coppice.learner.forest import trees
from coppice.learner.update.plan import plan_of
from coppice.scheduler.dispatch.residency import Prefixes
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.rewards import COMPONENTS
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.tree import Tree
from coppice.tools.launching.settings import Config
from coppice.wire import messages as wire

OUTCOME = frozenset({"outcome", "f1"})
"""What a judge of the outcome gives, and no other."""
CHARACTERS = 4
"""Characters of a token, for the opening of a forced answer."""
TOKENS, UPDATES = 500_000, 16
"""Trees are simulated until all their samples with their prompts have this many tokens (some
seconds), at least one tree and at most this many updates."""


class Work(msgspec.Struct, frozen=True):
    """What one update takes; numbers of tokens unless said otherwise.

    nodes, turns, calls, judged: of the trees, of the groups, of generate calls, and of actions that
    judges saw. sampled; prompt: of all samples, as if each had its own request; prefilled: with
    shared prefixes. context: the sum over sampled tokens of the prefix that each reads. longest:
    sampled one after the other in a tree (mean over trees). steps: calls one after the other (mean
    over trees). path, packed, forwarded: of all trained turns, of their trie, and of the
    micro-batches of an epoch. path_pairs, pairs: (query, key) pairs of attention. path_targets,
    targets: rows of the head.
    """

    nodes: float = 0
    turns: float = 0
    calls: float = 0
    judged: float = 0
    sampled: float = 0
    prompt: float = 0
    prefilled: float = 0
    context: float = 0
    longest: float = 0
    steps: float = 0
    path: float = 0
    packed: float = 0
    forwarded: float = 0
    path_pairs: float = 0
    pairs: float = 0
    path_targets: float = 0
    targets: float = 0


def going_on(turns: float, budget: int) -> float:
    """Return the probability p that an action is not the last, so that episodes of at most
    ``budget`` actions have ``turns`` in the mean: the p with 1 + p + p^2 + .. + p^(budget - 1) =
    turns."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if math.fsum(p**i for i in range(budget)) < turns else (low, p)
    return high


def seeded(prefix: bytes, number: int = 0) -> random.Random:
    """Return the randomness of a prefix, the same in every process."""
    return random.Random(zlib.crc32(prefix) + (number << 32))


class SampledAction(msgspec.Struct, frozen=True):
    """tokens: int32. ends: whether it ends its episode. then: what the policy reads after it, an
    observation or the whole next prompt where prompts are fresh."""

    tokens: np.ndarray
    ends: bool
    then: np.ndarray


class MadeUp:
    """Texts of fixed lengths in tokens (``formulas.Assumed``), in which siblings share nothing.
    Which actions end their episode is drawn, so that its mean number of them is ``turns``."""

    def __init__(
        self, instruction: int, prompt: int, action: int, observation: int, turns: float,
        budget: int, fresh: bool,
    ):  # fmt: skip
        self.instruction, self.own = instruction, prompt - instruction
        self.length, self.observation, self.fresh = action, observation, fresh
        self.horizon = max(budget, math.ceil(turns))  # the most actions of an episode
        self.on = going_on(turns, self.horizon)

    def prompt(self, rng: random.Random) -> np.ndarray:
        """Return a prompt, int32."""
        return np.concatenate([np.arange(self.instruction, dtype=np.int32), _unlike(rng, self.own)])

    def action(self, prefix: bytes, turn: int, number: int) -> SampledAction:
        """Return the action that is drawn as number 0, 1, .. after a prefix, the bytes of int32,
        with ``turn`` actions before it."""
        rng = seeded(prefix, number)
        ends = turn + 1 >= self.horizon or rng.random() >= self.on
        tokens = _unlike(rng, self.length)
        then = self.prompt(rng) if self.fresh else _unlike(rng, self.observation)
        return SampledAction(tokens, ends, then)


def _unlike(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.getrandbits(24) for _ in range(count)], np.int32)


class NoJournal:
    """Stands for the journal: nothing is kept, and no text has pictures."""

    def save_nodes(self, tree: Tree) -> None:
        tree.changed.clear()

    def pictures(self, tokens: np.ndarray) -> dict[int, bytes]:
        return {}


class Numbers:
    """Stands for the text and its tokenizer: a text is token ids with spaces between them."""

    vocabulary = 0

    @property
    def tokenizer(self) -> "Numbers":
        return self

    def get_vocab_size(self) -> int:
        return 2**17  # of a common tokenizer, for strategies that ask for it

    def encode(self, text: str, pictures: Sequence[tuple[int, bytes]] = ()) -> np.ndarray:
        return np.array(text.split(), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens.tolist()))

    def prompt(self, messages: Sequence[dict[str, Any]], *_: Any) -> str:
        return "".join(message["content"] for message in messages)


class EpisodeState(msgspec.Struct, frozen=True):
    """What the policy has read so far, as bytes of int32, and the number of actions in it."""

    prefix: bytes
    turn: int = 0


class World(Environment):
    """Stands for the run's environment, actors and judges: answers every call at once by
    ``source``, and counts."""

    name = "simulated"

    def __init__(self, config: Config, source: MadeUp):
        self.source, self.text, self.actors = source, Numbers(), config.actors.count
        real = registry.load(config.data.environment, config.data.options)
        for name in "fresh outcome_judge measured rewarded_by_judge gives_step_rewards".split():
            setattr(self, name, getattr(real, name))
        self.forced_prefix = " ".join(["0"] * -(-len(real.forced_prefix) // CHARACTERS))
        s = config.scheduler
        self.strategy = strategies.load(s.strategy, s.strategy_options)
        needs, own = plan_of(config.learner).scheme.needs, self.strategy.gives
        self.columns = (needs.columns | COMPONENTS | {"reward"}) - own.columns - own.purpose
        # this engine keeps what follows the end of a prompt
        self.end = [-1] if config.actors.engine == "local" else []
        self.turns: dict[bytes, int] = {}  # of each prefix after which an action begins
        self.draws: Counter[bytes] = Counter()  # after it
        self.begin()

    def begin(self) -> None:
        """Begin an update, with empty caches."""
        self.caches = [Prefixes() for _ in range(self.actors)]
        self.counts: Counter[str] = Counter()
        self.longest: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.offered: dict[bytes, SampledAction] = {}  # by prefix and tokens

    def initial(self, task: Task) -> EpisodeState:
        return self._place(self.source.prompt(random.Random(task.seed)), 0)

    def prompt(self, task: Task, state: EpisodeState) -> list[dict[str, Any]]:
        # all of a fresh prompt follows the separator: equal tokens are shared, whatever their node
        shown = self.text.decode(np.frombuffer(state.prefix, np.int32))
        return [{"content": f"{SPLIT}{shown}" if self.fresh else shown}]

    def read(self, state: EpisodeState, text: str) -> Action:
        return Action("answer" if self._offered(state, text).ends else "search", text)

    async def step(self, state: EpisodeState, action: Action, tools: Tools) -> Transition:
        taken = self._offered(state, action.text)
        reward = 0.0 if self.gives_step_rewards else None
        if taken.ends:
            drawn = float(seeded(state.prefix, len(action.text)).random() < 0.5)
            outcome = None if self.outcome_judge else drawn
            measures = dict.fromkeys(self.measured, 0.0)
            return Transition(state, "", True, outcome, measures, reward=reward)
        prefix, said = taken.then, ""
        if not self.fresh:
            read = [np.frombuffer(state.prefix, np.int32), self.text.encode(action.text)]
            prefix, said = np.concatenate([*read, taken.then]), f" {self.text.decode(taken.then)}"
        return Transition(self._place(prefix, state.turn + 1), said, False, reward=reward)

    def _offered(self, state: EpisodeState, text: str) -> SampledAction:
        return self.offered[state.prefix + self.text.encode(text).tobytes()]

    def _place(self, prefix: np.ndarray, turn: int) -> EpisodeState:
        place = EpisodeState(prefix.astype(np.int32).tobytes(), turn)
        self.turns[place.prefix] = turn
        return place

    async def call(self, service: str, request: Any, place: Any = None, **_: Any) -> Any:
        """Answer as an actor or a judge does, whose scores are drawn."""
        if isinstance(request, wire.GenerateRequest):
            return self._generate(request, place.tree)
        self.counts["judged"] += len(request.turns)
        columns = OUTCOME if service == f"judge.{self.outcome_judge}" else self.columns - OUTCOME

        def scored(turn: wire.JudgedTurn) -> wire.Judgement:
            rng = seeded(turn.response.encode())
            return wire.Judgement({name: float(rng.random() < 0.5) for name in sorted(columns)})

        return wire.JudgeResult([scored(turn) for turn in request.turns])

    def _generate(self, request: wire.GenerateRequest, tree: int) -> wire.GenerateResult:
        prefix, n = request.tokens.astype(np.int32), request.n
        length = next(k for k in range(len(prefix), 0, -1) if prefix[:k].tobytes() in self.turns)
        base, kept = prefix[:length].tobytes(), len(prefix) - length
        cache = self.caches[tree % len(self.caches)]
        whole = np.append(prefix, self.end).astype(np.int32)
        cached = cache.match(whole.tobytes())
        cached -= cached in (len(prefix), len(whole))  # the last token is read again, or is the end
        cache.insert(whole.tobytes())
        samples = [self._sample(base, kept, request) for _ in range(n)]
        for sample in samples:
            cache.insert(np.concatenate([prefix, sample.tokens[:-1]]).tobytes())
        lengths = [len(sample.tokens) for sample in samples]
        own, turn = self.longest[tree], self.turns[base]
        own[turn] = max(own[turn], *lengths)
        self.counts.update(calls=1, sampled=sum(lengths), prompt=n * len(prefix))
        self.counts["prefilled"] += len(prefix) - cached
        self.counts["context"] += sum(m * len(prefix) + m * (m + 1) // 2 for m in lengths)
        return wire.GenerateResult(samples, len(prefix), cached)

    def _sample(self, base: bytes, kept: int, request: wire.GenerateRequest) -> wire.Sample:
        """Return the next action of a place. kept: tokens of it that the request has already, as at
        a fork."""
        action = self.source.action(base, self.turns[base], self.draws[base])
        self.draws[base] += 1
        tokens = action.tokens[min(kept, len(action.tokens) - 1) :][: request.sampling.max_tokens]
        self.offered[request.tokens.astype(np.int32).tobytes() + tokens.tobytes()] = action
        rng = seeded(tokens.tobytes())
        logprobs = -np.array([rng.expovariate(4) for _ in tokens], np.float32)
        top = [{0: -rng.expovariate(2)} for _ in tokens] if request.sampling.top_logprobs else None
        return wire.Sample(tokens, logprobs, np.zeros(len(tokens), np.int32), "stop", top, b"")


def work_of(config: Config, source: MadeUp) -> Work:
    """Return the mean work of an update, from a few that are grown, or from some trees of one if it
    is large."""
    questions = config.scheduler.questions_per_update
    one = grown(config, source, 1, 1)
    each = max(1, one.sampled + one.prompt)
    size = max(1, min(questions, int(TOKENS // each)))
    updates = int(max(1, min(UPDATES, TOKENS / (size * each))))
    work = msgspec.structs.asdict(grown(config, source, size, updates))
    scale = {name: 1.0 if name in ("longest", "steps") else questions / size for name in work}
    return Work(**{name: value * scale[name] for name, value in work.items()})


def grown(config: Config, source: MadeUp, size: int, updates: int) -> Work:
    """Grow ``updates`` updates of ``size`` trees. Returns the mean of what an update takes."""
    world, total = World(config, source), dict[str, float]()
    parts = max(1, round(config.learner.minibatches * size / config.scheduler.questions_per_update))
    for update in range(updates):
        world.begin()
        planted = [Tree(n, str(n)) for n in range(update * size, (update + 1) * size)]
        paths = loop.run(_grow(config, world, planted))
        work = packed(paths, config.learner.micro_tokens, config.learner.count, parts)
        work |= world.counts
        work["nodes"] = sum(len(tree.nodes) for tree in planted)
        work["longest"] = sum(sum(turns.values()) for turns in world.longest.values()) / size
        work["steps"] = sum(map(len, world.longest.values())) / size
        total |= {name: total.get(name, 0.0) + value / updates for name, value in work.items()}
    return Work(**total)


async def _grow(config: Config, world: World, planted: Sequence[Tree]) -> list[list[trees.Path]]:
    """Grow trees to their ends. Returns the turns that each of them emits."""
    s, groups = config.scheduler, itertools.count()
    paths: dict[int, list[trees.Path]] = {tree.id: [] for tree in planted}

    def emit(tree: Tree, turns: list[wire.Turn]) -> None:
        tree.groups.append(next(groups))
        for turn in turns:
            node = tree.nodes[turn.node]
            tokens = tree.prefix(node).astype(np.int64)
            paths[tree.id].append(trees.Path(tokens, len(tokens) - len(node.tokens)))

    services: Any = world  # of which a context uses no more than stands here
    journal: Any = NoJournal()
    text: Any = world.text
    most, longest = max(1, config.actors.max_batch // 4), config.actors.max_context
    runtime = Runtime(services, journal, text, world, s, Counter(), emit, most, longest=longest)

    async def grow(tree: Tree) -> None:
        context = Context(runtime, Task(tree.task, seed=tree.id), tree, random.Random(tree.id))
        await context.plant()
        await world.strategy(tree, context)

    await asyncio.gather(*map(grow, planted))
    return list(paths.values())


def packed(
    questions: Sequence[Sequence[trees.Path]], micro_tokens: int, ranks: int, minibatches: int = 1
) -> dict[str, float]:
    """Return what the learner forwards for the turns of some questions, by the names of ``Work``.
    The minibatches share the questions."""
    paths = [path for own in questions for path in own]
    lengths = np.array([len(path.tokens) for path in paths])
    ends = np.cumsum([len(own) for own in questions])
    parts = np.array_split(ends, min(minibatches, len(questions)))
    bounds = [0, *(int(part[-1]) for part in parts)]
    trie = trees.Trie(paths)
    cuts = [trie.cuts(range(a, b)) for a, b in itertools.pairwise(bounds) if b > a]
    forest = trie.forest(range(len(paths)), True)
    return {
        "turns": len(paths),
        "path": forest.path_tokens,
        "packed": forest.nodes,
        "forwarded": sum(sum(trees.balanced(cut, micro_tokens, ranks)[1]) for cut in cuts),
        "path_pairs": float((lengths * (lengths + 1) / 2).sum()),
        "pairs": float((forest.depth + 1).sum()),
        "path_targets": len(forest.target),
        "targets": len(np.unique(np.stack([forest.read, forest.target]), axis=1).T),
    }
