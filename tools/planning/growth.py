"""Grows the trees of one update by the real strategy, with a simulated policy, environment and judge, and counts what actors and learner get to do.

No model is needed, and a strategy of one's own is counted like a built-in one. Caches are the scheduler's own model of a prefix cache, unlimited
and empty before each update; the paths are packed and cut by the learner's own code.
"""

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition
from learner import schemes, trees
from scheduler import strategies
from scheduler.context import Context
from scheduler.journal import Journal
from scheduler.residency import Prefixes
from scheduler.rewards import COMPONENTS
from scheduler.services import Shop
from scheduler.tree import Tree
from tools.launching.settings import Config
from tools.planning.samples import ACTION, DIGITS, ENDS, INVALID, SEEN, Source, seeded, turn_of
from wire import loop
from wire.messages import GenerateRequest, GenerateResult, Judgement, JudgeRequest, JudgeResult, Sample, Turn

OUTCOME = frozenset({"outcome", "f1"})
"""What a judge of the outcome gives, and no other."""
VOCABULARY = 2**17
"""The size of a tokenizer, for strategies that ask for it."""
CHARACTERS = 4
"""Characters of a token, for the opening of a forced answer."""


class Work(msgspec.Struct, frozen=True):
    """What one update takes; numbers of tokens unless said otherwise.

    nodes, turns, calls: of the trees, of the groups, and of generate calls. sampled; prompt: of all samples, as if each had its own request; prefilled:
    with shared prefixes. context: the sum over sampled tokens of the prefix that each reads. longest: sampled one after the other in a tree (mean
    over trees). steps: calls one after the other (mean over trees). path, packed, forwarded: of all trained turns, of their trie, and of the
    micro-batches. path_pairs, pairs: (query, key) pairs of attention. path_targets, targets: rows of the head.
    """

    nodes: float = 0
    turns: float = 0
    calls: float = 0
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


class Forgetting(Journal):
    """A journal that writes nothing."""

    def __init__(self, path: Path = Path(":memory:")):
        super().__init__(path)

    def _write(self, *statements: Any) -> None: ...

    def _rows(self, query: str, values: Any = ()) -> Any:
        raise AssertionError(f"{query} was read")


class Numbers:
    """Stands for the tokenizer: a text is token ids with spaces between them."""

    vocabulary = 0

    @property
    def tokenizer(self) -> "Numbers":
        """The tokenizer."""
        return self

    def get_vocab_size(self) -> int:
        """Return the number of ids that a text has by itself."""
        return VOCABULARY

    def encode(self, text: str, pictures: Sequence[tuple[int, bytes]] = ()) -> np.ndarray:
        """Return int32 [tokens]."""
        return np.array(text.split(), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of the ids."""
        return " ".join(map(str, tokens.tolist()))

    def prompt(self, messages: Sequence[dict[str, Any]], *_: Any) -> str:
        """Return the contents of the messages."""
        return "".join(message["content"] for message in messages)


class Place(msgspec.Struct, frozen=True):
    """The state of an episode: the prefix so far, as bytes of int32, and the number of actions in it."""

    prefix: bytes
    turn: int = 0


class Simulated(Environment):
    """An environment that answers by ``source``, and otherwise works as the run's own one does."""

    name = "simulated"

    def __init__(self, real: Environment, source: Source):
        self.real, self.source, self.text = real, source, Numbers()
        for name in ("fresh", "outcome_judge", "rewarded_by_judge", "measured", "gives_step_rewards"):
            setattr(self, name, getattr(real, name))
        opening = max(1, len(real.forced_prefix) // CHARACTERS) if real.forced_prefix else 0
        self.forced_prefix = " ".join([str(SEEN)] * opening)

    def initial(self, task: Task) -> Place:
        """See ``Environment``."""
        return Place(self.source.prompt(task.seed).tobytes())

    def prompt(self, task: Task, state: Place) -> list[dict[str, Any]]:
        """See ``Environment``. A fresh prompt's own part follows the separator."""
        head = self.text.decode(self.source.prompt(task.seed))
        tail = self.text.decode(self.source.tail(state.turn, seeded(state.prefix))) if self.fresh else ""
        return [{"content": f"{head} {SPLIT}{tail}" if self.fresh else head}]

    def read(self, state: Place, text: str) -> Action:
        """See ``Environment``."""
        digit = int(text.rpartition(" ")[2]) % DIGITS
        return Action({ENDS: "answer", INVALID: "invalid"}.get(digit, "search"), text)

    async def step(self, state: Place, action: Action, tools: Tools) -> Transition:
        """See ``Environment``. The same action in the same place is always answered alike."""
        prefix = state.prefix + self.text.encode(action.text).tobytes()
        reward = 0.0 if self.gives_step_rewards else None
        if action.kind == "answer":
            outcome = None if self.outcome_judge else float(seeded(prefix).random() < 0.5)
            return Transition(
                Place(prefix, state.turn + 1), "", True, outcome, dict.fromkeys(self.measured, 0.0), reward=reward
            )
        if self.fresh:
            return Transition(Place(prefix, state.turn + 1), "", False, reward=reward)
        rng = seeded(prefix)
        same = [one.seen for one in self.source.choices(state.prefix, state.turn, seeded(state.prefix))
                if one.seen is not None and self.text.decode(one.tokens) == action.text]  # fmt: skip
        others = (
            one.seen for _ in range(64) for one in self.source.choices(b"", state.turn, rng) if one.seen is not None
        )
        seen = same[0] if same else next(others, np.zeros(0, np.int32))
        return Transition(
            Place(prefix + seen.tobytes(), state.turn + 1), f" {self.text.decode(seen)}", False, reward=reward
        )


class Services:
    """Stands for the dispatcher: answers every call at once, and counts."""

    def __init__(self, source: Source, actors: int, columns: frozenset[str], outcome_judge: str):
        self.source, self.columns, self.outcome_judge = source, columns, outcome_judge
        self.caches = [Prefixes() for _ in range(actors)]
        self.counts: Counter[str] = Counter()
        self.drawn: Counter[bytes] = Counter()
        self.longest: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.scores: dict[str, dict[str, float]] = {}

    async def call(self, service: str, request: Any, place: Any = None, **_: Any) -> Any:
        """Answer as an actor or a judge does."""
        if isinstance(request, GenerateRequest):
            return self._generate(request, place.tree)
        assert isinstance(request, JudgeRequest), f"no simulated episode calls {service}"
        ended = service == f"judge.{self.outcome_judge}"
        return JudgeResult([Judgement(self._scored(turn.response, ended)) for turn in request.turns])

    def _scored(self, text: str, ended: bool) -> dict[str, float]:
        """Return the scores that the run's judges gave to an action with this text; a column that it lacks is drawn."""
        known, rng = self.scores.get(text, {}), seeded(text.encode())
        columns = OUTCOME if ended else self.columns - OUTCOME
        return {name: known.get(name, float(rng.random() < 0.5)) for name in sorted(columns)}

    def _generate(self, request: GenerateRequest, tree: int) -> GenerateResult:
        prefix, n = request.tokens.astype(np.int32), request.n
        kept = int(np.argmax(np.append(prefix[::-1] % DIGITS != ACTION, True)))
        base = prefix[: len(prefix) - kept]
        turn, cache = turn_of(base), self.caches[tree % len(self.caches)]
        forced = bool(len(base)) and int(base[-1]) == SEEN
        cached = cache.match(prefix[:-1].tobytes())
        cache.insert(prefix.tobytes())
        samples = [self._sample(base, turn, kept, request) for _ in range(n)]
        for sample in samples:
            cache.insert(np.concatenate([prefix, sample.tokens[:-1]]).tobytes())
        lengths = [len(sample.tokens) for sample in samples]
        own = self.longest[tree]
        step = turn + forced
        own[step] = max(own[step], *lengths)
        context = sum(m * len(prefix) + m * (m + 1) // 2 for m in lengths)
        self.counts.update(
            calls=1, sampled=sum(lengths), prompt=n * len(prefix), prefilled=len(prefix) - cached, context=context
        )
        return GenerateResult(samples, len(prefix), cached)

    def _sample(self, base: np.ndarray, turn: int, kept: int, request: GenerateRequest) -> Sample:
        """Return the next action of a place: each of its recorded ones once, then those of other places."""
        key = base.tobytes()
        choices, number = self.source.choices(key, turn, seeded(key)), self.drawn[key]
        self.drawn[key] += 1
        while number >= len(choices):
            number -= len(choices)
            rng = random.Random(f"{key.hex()}/{self.drawn[key]}/{number}/{len(choices)}")
            choices = self.source.choices(b"", turn, rng)
        action = choices[number]
        tokens = action.tokens[min(kept, len(action.tokens) - 1) :][: request.sampling.max_tokens]
        if len(tokens) < len(action.tokens) - kept:  # cut by the limit: the last token still says what the action is
            tokens = np.append(tokens[:-1], action.tokens[-1])
        if action.scores:
            self.scores[Numbers().decode(action.tokens)] = action.scores
        rng = seeded(tokens.tobytes())
        logprobs = -np.array([rng.expovariate(4) for _ in tokens], np.float32)
        top = [{0: -rng.expovariate(2)} for _ in tokens] if request.sampling.top_logprobs else None
        return Sample(tokens, logprobs, np.zeros(len(tokens), np.int32), "stop", top, b"")


def grown(config: Config, real: Environment, source: Source, trees_of_update: range, actors: int, ranks: int) -> Work:
    """Grow the trees with these numbers as those of one update. Returns what they take."""
    return loop.run(_grown(config, real, source, trees_of_update, actors, ranks))


async def _grown(config: Config, real: Environment, source: Source, numbers: range, actors: int, ranks: int) -> Work:
    needs = schemes.load(config.learner.scheme, config.learner.scheme_options).needs
    columns = needs.columns | COMPONENTS | {"reward"}
    strategy, paths = strategies.load(config.scheduler.strategy, config.scheduler.strategy_options), list[trees.Path]()
    groups = itertools.count()

    def emit(tree: Tree, turns: list[Turn]) -> None:
        tree.groups.append(next(groups))
        for turn in turns:
            tokens = tree.prefix(tree.nodes[turn.node]).astype(np.int64)
            paths.append(trees.Path(tokens, len(tokens) - len(tree.nodes[turn.node].tokens)))

    services: Any = Services(source, actors, columns, real.outcome_judge)
    text: Any = Numbers()
    most, longest = max(1, config.actors.max_batch // 4), config.actors.max_context
    world = Simulated(real, source)
    shop = Shop(services, Forgetting(), text, world, config.scheduler, Counter(), emit, most, longest=longest)
    grown_trees = [Tree(number, str(number)) for number in numbers]

    async def grow(tree: Tree) -> None:
        context = Context(shop, Task(tree.task, seed=tree.id), tree, random.Random(tree.id))
        await context.plant()
        await strategy(tree, context)

    await asyncio.gather(*map(grow, grown_trees))
    shop.journal.close()
    ended = {name: float(services.counts[name]) for name in ("calls", "sampled", "prompt", "prefilled", "context")}
    spans = [services.longest[tree.id] for tree in grown_trees]
    return Work(
        nodes=sum(len(tree.nodes) for tree in grown_trees),
        longest=sum(sum(span.values()) for span in spans) / len(spans),
        steps=sum(map(len, spans)) / len(spans),
        **ended,
        **packed(paths, config.learner.micro_tokens, ranks),
    )


def packed(paths: Sequence[trees.Path], micro_tokens: int, ranks: int) -> dict[str, float]:
    """Return what the learner forwards for some paths, by the names of ``Work``."""
    trie = trees.Trie(paths)
    forest, where = trie.forest(range(len(paths)), True), trie.cuts(range(len(paths)))
    lengths = np.array([len(path.tokens) for path in paths])
    return {
        "turns": len(paths),
        "path": forest.path_tokens,
        "packed": forest.nodes,
        "forwarded": sum(trees.balanced(where, micro_tokens, ranks)[1]),
        "path_pairs": float((lengths * (lengths + 1) / 2).sum()),
        "pairs": float((forest.depth + 1).sum()),
        "path_targets": len(forest.target),
        "targets": len(np.unique(np.stack([forest.read, forest.target]), axis=1).T),
    }
