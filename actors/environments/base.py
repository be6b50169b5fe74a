"""The environment contract. States are immutable values and stepping is pure, so branching is free
and a crash loses nothing."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, Passage

SPLIT = "\x1e"
"""A separator in a prompt's content. The text before it is the same in every turn of the episode;
the text after it shows this turn's state."""
POLICY = "policy"
"""The speaker that is the policy itself. Every other speaker is a service."""
HELD_OUT_SEEDS = range(2**30, 2_000_000_000)
"""The seeds of held-out tasks that an environment makes. Training draws smaller seeds, and warm
starts draw larger ones."""


def prompt_template(prompt: str, folder: Path) -> tuple[Path, str]:
    """Return the file and the text of a prompt: the name of a .txt file in ``folder``, or a path
    with a slash. Raises FileNotFoundError, which lists the names."""
    path = folder / f"{prompt}.txt" if "/" not in prompt else Path(prompt)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.txt")))
        wish = f"expected one of {names}, or a path with a slash"
        raise FileNotFoundError(f"prompt {prompt!r}: no file {path}; {wish}")
    return path, path.read_text().strip()


class Task(msgspec.Struct, frozen=True):
    """One problem, either read from a task file or made from ``seed`` by a game."""

    id: str
    question: str = ""
    golds: list[str] = []
    evidence: list[str] = []
    """The supporting passages "Title\\nField: value", one per hop."""
    hops: int = 1
    source: str = ""
    seed: int = 0
    row: dict[str, Any] = {}
    """All columns of the task file's row, for environments that are ``verbatim``."""

    def __post_init__(self) -> None:
        """Raise TypeError or OverflowError where a value cannot be written."""
        msgspec.msgpack.encode(self)

    @property
    def digest(self) -> str:
        """Tells the task from another one that its draw may give after an edit."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]


class RejectedTask(msgspec.Struct, frozen=True):
    """A task that cannot work, with the reason. It is quarantined, never silently dropped."""

    where: str
    reason: str


class Action(msgspec.Struct, frozen=True):
    """A parsed action."""

    kind: str
    """Such as "search" or "move". "illegal" is readable, but against the rules; "invalid" is not
    readable."""
    text: str
    argument: str | None = None
    """The words of the action: a query, an answer, a command, what is said."""
    move: tuple[int, ...] | None = None
    """The integers that a game uses for a move."""
    think: str | None = None

    @property
    def valid(self) -> bool:
        return self.kind not in ("invalid", "illegal")


class Dropped(DataFault):
    """An episode cannot go on, and the policy is not to blame: it has no outcome, and its task
    stays.

    count: the metric that counts it; what: how the terminal names what failed.
    """

    count = "dropped_branches"
    what = "the replay of an episode"


class Diverged(Dropped):
    """The state cannot be reached again, because what stands for it does not repeat itself."""


class TurnedAway(Dropped):
    """The program that acts for the policy ended because its request was refused."""

    count = "refused_episodes"
    what = "an agent's request"


class Transition(msgspec.Struct, frozen=True):
    """The result of a step."""

    state: Any
    observation: str
    """The text that answers the action. If turns are appended, the policy reads it next ("" when
    done). If each turn is a fresh prompt, it is kept in the tree for readers only."""
    done: bool
    outcome: float | None = None
    """The episode's return, if the episode ends here and its rules alone decide the return."""
    measures: dict[str, float] = {}
    """Named results of a finished episode, such as success and completion."""
    reward: float | None = None
    """The environment's own reward of this step: the action's column "step_reward"."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages in the place of the observation."""
    after: int | None = None
    """The number of the episode's action whose reply ``messages`` follow. None says that the next
    prompt is ``Environment.prompt`` of the state, which begins a branch at the root."""
    fault: str = ""
    """Why something other than the rules ended the episode, its first line for a terminal. It is
    kept with the action, as the note "crashed"."""


class Spent(msgspec.Struct, frozen=True):
    """What one action took, in tokens."""

    prompt: int = 0
    cached: int = 0
    """Tokens of the prompt that the engine had cached."""
    sampled: int = 0
    finish: str = "stop"
    """Why sampling ended: "length" if a limit of tokens cut the action."""


class Tools:
    """The slow services that an environment may await while it steps, and the source of its
    randomness."""

    rng: random.Random

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        """Return the best ``topk`` passages for a query."""
        raise NotImplementedError

    def check(self, transition: Transition) -> None:
        """Raise unless the policy can be shown what follows ``transition``, and the journal can
        keep it."""

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]) -> int:
        """Return how many tokens the policy's prompt of a conversation has. Raises ValueError if
        the chat template refuses it."""
        raise DataFault(
            "these tools have no tokenizer, so they cannot count the tokens of a conversation"
        )

    def spent(self) -> Spent:
        """Return what the action took that is stepped."""
        return Spent()

    def replies(self) -> tuple[str, ...]:
        """Return the texts of the trajectory's actions up to the one that is stepped."""
        return ()

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """Return the move of the opponent that is served as ``player.<player>``."""
        raise NotImplementedError

    async def say(
        self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]
    ) -> str:
        """Return a reply of at most ``max_tokens`` tokens, without the string of ``stop`` that
        ended it.

        speaker: ``POLICY``, whose reply is sampled with the newest weights and never trained, or
        the speaker that is served as ``speaker.<speaker>``.
        """
        raise NotImplementedError


class Environment(Protocol):
    """The pure rules of one kind of task, without the state of any episode. States are frozen,
    hashable structs.

    A subclass writes ``initial``, ``prompt``, ``read`` and ``step``, and ``task(seed) -> Task``
    unless tasks come from files; a seed gives the same task on every machine. The defaults of
    everything else suit a game whose rules end the episode and whose judge gives the reward
    (docs/extend.md).
    """

    name: str
    stop: list[str] = []
    """Strings that end an action."""
    forced_prefix: str = ""
    """Text that forces a final answer once the budget of steps is used up. With "", episodes end
    only by the rules."""
    outcome_judge: str = ""
    """The judge that gives the outcome of a finished episode. With "", the last transition gives
    it."""
    speakers: Sequence[str] = ()
    """The names with which the environment calls ``Tools.say``. A run serves, and waits for, those
    other than ``POLICY``."""
    measured: Sequence[str] = ()
    """The keys of ``Transition.measures``: score columns of an episode's last turn."""
    gives_step_rewards: bool = False
    """Whether every transition has a ``reward``."""
    headline: str = "return"
    """The most important measure."""
    marks: Sequence[str] = ()
    """Special tokens of the model that stay in the text of its actions. All others are no text."""
    verbatim: bool = False
    """Whether questions of task files are taken as they stand, and may lack a gold answer."""
    searches: bool = False
    """Whether it calls ``Tools.retrieve``. Then a run has a retriever."""
    pictures: bool = False
    """Whether prompts show pictures. Then the policy must be a model that reads them."""
    fresh: bool = True
    """If True, each turn is a new prompt that shows the state. If False, observations are appended
    to one growing text."""
    rewarded_by_judge: bool = True
    """If True, the judge sees every action and its column "reward" is the reward. If False, the
    reward is composed of the judge's columns for valid actions."""
    begins_with_prompt: bool = True
    """If False, the prompt is known only after ``open``, also where turns are appended."""

    def initial(self, task: Task) -> Any:
        """Return the first state. This may take long (a generated puzzle)."""
        ...

    async def open(self, state: Any, tools: Tools) -> Any:
        """Return the state in which the policy acts first (after the move of an opponent that
        begins)."""
        return state

    def prompt(self, task: Task, state: Any) -> list[dict[str, Any]]:
        """Return the chat messages to which the policy replies. ``SPLIT`` ends the part that all
        turns share; before it, nothing may change.

        A message's content is a text, or a list of the parts {"type": "text", "text": str} and
        {"type": "image", "image": PNG bytes}.
        """
        ...

    def read(self, state: Any, text: str) -> Action:
        """Return the action that generated text means in ``state``."""
        ...

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition:
        """Return the result of ``action``. Raises Dropped."""
        ...

    async def close(self) -> None:
        """End what episodes have started."""

    def tools(self, state: Any) -> list[dict[str, Any]]:
        """Return the functions that the policy may call, in the form of chat completions."""
        return []

    def anchor(self, state: Any) -> str | None:
        """Return what is equal for equal situations of one task, for GiGPO: without the step count
        and earlier turns. With None, turns with equal prompts are in the same situation."""
        return None

    def stops(self, state: Any) -> list[str]:
        """Return the strings that end an action in ``state``."""
        return self.stop

    def most(self, state: Any) -> int:
        """Return the most tokens of an action if that is fewer than the run's, else 0."""
        return 0

    def beginning(self, state: Any) -> str:
        """Return how every action in ``state`` begins: text that is given and never trained."""
        return ""

    def replies(self, state: Any) -> list[str]:
        """Return the replies among which a player without a model chooses, in a fixed order: none
        where replies need words of their own."""
        return []

    def parse_forced(self, text: str) -> Action:
        """Return the action generated after ``forced_prefix``."""
        return Action("invalid", text)

    def outgrown(self, state: Any) -> Transition:
        """Return the end of an episode in ``state``, whose prompt has no room in the policy's
        context: by default a failure that scores 0."""
        return Transition(state, "", True, 0.0, dict.fromkeys(self.measured, 0.0))

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn:
        """Return what a judge or an oracle sees of ``action`` taken in ``state``. ``step`` counts
        from 1."""
        return JudgedTurn(
            question=task.question or task.id,
            golds=task.golds,
            context="",
            response=action.text,
            step=step,
            budget=budget,
            state=msgspec.to_builtins(state),
            move=None if action.move is None else list(action.move),
        )

    def recalled(
        self, turn: JudgedTurn, state: Any, before: Sequence[tuple[str, str]]
    ) -> JudgedTurn:
        """Return a turn with what its judge is to see of the turns before it, each the action's
        text and what the policy read next. Not needed where states hold what happened."""
        return turn

    def concluded(
        self, task: Task, before: Any, action: Action, after: Any | None, step: int, budget: int
    ) -> JudgedTurn:
        """Return what the outcome judge sees of a finished episode: by default what a judge sees of
        its last action.

        before, after: the states around the last action. after is None if each turn is no fresh
        prompt, or if the last transition had no observation, because only an observation keeps the
        last state.
        """
        return self.judged(task, before, action, step, budget)

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return named results of a finished episode. turns: the score columns of its turns, in
        order; "forced" is 1 for a forced answer.

        By default: return, turns, the measures of the last turn, and per turn "valid" and "oracle"
        (its reward; a share if it is binary). Without an outcome: the number of turns alone.
        """
        last = turns[-1]
        if "outcome" not in last:
            return {"turns": [float(len(turns))]}
        results = {"return": [last["outcome"]], "turns": [float(len(turns))]}
        results |= {name: [last[name]] for name in self.measured if name in last}
        results |= {"valid": [turn["valid"] for turn in turns if "valid" in turn]}
        return results | {"oracle": [turn["reward"] for turn in turns if "reward" in turn]}
