"""The environment contract. States are immutable values and stepping is pure, so branching is free
and a crash loses nothing."""

import random
from collections.abc import AsyncIterator, Mapping, Sequence
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


PROMPTS = Path(__file__).parent / "prompts"


def prompt_file(prompt: str, family: str = "") -> Path:
    """Return the file of a prompt: a name in prompts/ without its ending, or a path with a slash.

    Raises FileNotFoundError, which lists the names that begin with ``family``.
    """
    path = PROMPTS / f"{prompt}.txt" if "/" not in prompt else Path(prompt)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROMPTS.glob(f"{family}*.txt")))
        raise FileNotFoundError(
            f"prompt {prompt!r}: no file {path}; expected one of {known}, or a path with a slash"
        )
    return path


HELD_OUT_SEEDS = range(2**30, 2_000_000_000)
"""The seeds of held-out tasks that an environment makes. Training draws smaller seeds, and warm
starts draw larger ones."""


class Task(msgspec.Struct, frozen=True):
    """One problem, either read from a task file or made from ``seed`` by a game.

    evidence: the supporting passages "Title\\nField: value", one per hop. row: all columns of the
    task file's row, as JSON has them, for environments that take tasks as they stand
    (``Environment.verbatim``).
    """

    id: str
    question: str = ""
    golds: list[str] = []
    evidence: list[str] = []
    hops: int = 1
    source: str = ""
    seed: int = 0
    row: dict[str, Any] = {}


class Rejected(msgspec.Struct, frozen=True):
    """A task that cannot work, with the reason. It is quarantined, never silently dropped."""

    where: str
    reason: str


class Action(msgspec.Struct, frozen=True):
    """A parsed action.

    kind: "search" or "answer" (search QA), "move" (a legal move of a game), "illegal" (readable,
    but against the rules) or "invalid" (not readable). move: the integers that the game uses for a
    move, None when there is no move.
    """

    kind: str
    text: str
    think: str | None = None
    query: str | None = None
    answer: str | None = None
    move: tuple[int, ...] | None = None

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
    """The result of a step.

    observation: the text that answers the action. If turns are appended, the policy reads it next
    ("" when done). If each turn is a fresh prompt, it is kept in the tree for readers only (""
    keeps nothing). outcome: the episode's return, if the episode ends here and its rules alone
    decide the return. measures: named results of a finished episode, such as success and
    completion. reward: the environment's own reward of this step, which becomes the action's column
    "step_reward". messages: chat messages in the place of the observation, which follow the reply
    to which they belong: the action's own, or that of the episode's earlier action number
    ``after``. An ``after`` of None says that the next prompt is ``Environment.prompt`` of the
    state, which begins a branch at the root. fault: why something other than the rules ended the
    episode, its first line for a terminal; it is kept with the action, as the note "crashed".
    """

    state: Any
    observation: str
    done: bool
    outcome: float | None = None
    measures: dict[str, float] = {}
    reward: float | None = None
    messages: list[dict[str, Any]] | None = None
    after: int | None = None
    fault: str = ""


class Spent(msgspec.Struct, frozen=True):
    """What one action took. prompt: tokens of its prompt; cached: those of them that the engine had
    cached; sampled: tokens of the action. finish: why sampling ended, as in
    ``wire.messages.Sample``: "length" if a limit of tokens cut the action."""

    prompt: int = 0
    cached: int = 0
    sampled: int = 0
    finish: str = "stop"


class Tools(Protocol):
    """The slow services that an environment may await while it steps, and the source of its
    randomness."""

    rng: random.Random

    async def retrieve(self, query: str, topk: int) -> list[Passage]: ...

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
        """Return the texts of the trajectory's actions, from the first one up to the action that is
        stepped."""
        return ()

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """Return the move of the opponent that is served as ``player.<player>``."""
        ...

    async def say(
        self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]
    ) -> str:
        """Return a reply to chat messages, without the string of ``stop`` that ended it.

        speaker: ``POLICY``, whose reply is sampled with the newest weights and never trained, or
        the speaker that is served as ``speaker.<speaker>``. max_tokens: of the reply.
        """
        ...


class Environment(Protocol):
    """The pure rules of one kind of task, without the state of any episode. States are frozen,
    hashable structs.

    A subclass writes ``initial``, ``prompt``, ``read`` and ``step``. The defaults of everything
    else suit a game whose rules end the episode and whose judge gives the reward (docs/extend.md).
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
    """Score columns that the last turn of an episode has beside "outcome": the keys of
    ``Transition.measures``."""
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
    reward is SLATE's composite."""

    def initial(self, task: Task) -> Any:
        """Return the first state. This may take long (a generated puzzle)."""
        ...

    begins_with_prompt: bool = True
    """If False, the prompt is known only after ``open``, also where turns are appended."""

    def tools(self, state: Any) -> list[dict[str, Any]]:
        """Return the functions that the policy may call in ``state``, in the form of chat
        completions."""
        return []

    async def open(self, state: Any, tools: Tools) -> Any:
        """Return the state in which the policy acts first (after the move of an opponent that
        begins)."""
        return state

    def prompt(self, task: Task, state: Any) -> list[dict[str, Any]]:
        """Return the chat messages to which the policy replies. ``SPLIT`` ends the part that all
        turns share.

        A message's content is a text, or a list of the parts {"type": "text", "text": str} and
        {"type": "image", "image": PNG bytes}.
        """
        ...

    def anchor(self, state: Any) -> str | None:
        """Return what is equal for equal situations of one task, for GiGPO. With None, turns with
        equal prompts are in the same situation.

        An environment whose prompt shows the step count or earlier turns returns the situation
        without them.
        """
        return None

    def beside(self, state: Any) -> AsyncIterator[tuple[str, Transition]] | None:
        """Return what else waits for the policy in the same episode while it acts in ``state``, or
        comes meanwhile, each with a name of its own: what ``step`` returns one after the other
        later. None where nothing can."""
        return None

    def stops(self, state: Any) -> list[str]:
        """Return the strings that end an action in ``state``."""
        return self.stop

    def most(self, state: Any) -> int:
        """Return the most tokens of an action in ``state`` if it is fewer than the run's, 0 for no
        limit of its own."""
        return 0

    def beginning(self, state: Any) -> str:
        """Return how every action in ``state`` begins: text that the policy is given and does not
        sample, so that it is not trained; "" for none."""
        return ""

    def read(self, state: Any, text: str) -> Action:
        """Return the action that generated text means in ``state``."""
        ...

    def replies(self, state: Any) -> list[str]:
        """Return the replies among which a player without a model chooses, in a fixed order: none
        where replies need words of their own."""
        return []

    def parse_forced(self, text: str) -> Action:
        """Return the action generated after ``forced_prefix``."""
        return Action("invalid", text)

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition:
        """Return the result of ``action``. Raises Dropped."""
        ...

    async def close(self) -> None:
        """End what episodes have started."""

    def outgrown(self, state: Any) -> Transition:
        """Return the end of an episode in ``state``, whose prompt has no room in the policy's
        context: by default a failure that scores 0."""
        return Transition(state, "", True, 0.0, dict.fromkeys(self.measured, 0.0))

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn:
        """Return what a judge or an oracle sees of ``action`` taken in ``state``."""
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
        text and what the policy read next. Environments whose states hold what happened have no
        need of it."""
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
        (its reward; a share if it is binary). An episode without an outcome has its turns alone.
        """
        last = turns[-1]
        if "outcome" not in last:
            return {"turns": [float(len(turns))]}
        results = {"return": [last["outcome"]], "turns": [float(len(turns))]}
        results |= {name: [last[name]] for name in self.measured if name in last}
        results |= {"valid": [turn["valid"] for turn in turns if "valid" in turn]}
        return results | {"oracle": [turn["reward"] for turn in turns if "reward" in turn]}


class Generator(Protocol):
    """An environment that makes its own tasks."""

    def task(self, seed: int) -> Task:
        """Return the task of ``seed``, which is the same on every machine."""
        ...
