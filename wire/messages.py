"""Every message that crosses a process boundary in Coppice.

A wire message is a list of ZeroMQ frames: ``[header, body, array, array, ...]``. The header is one of
the tagged ``Message`` structs; the body is one of the request or result structs named in ``SERVICES``
(absent for messages that have none); arrays follow as raw frames (see ``wire.arrays``). Nothing is pickled.

Units: times in seconds, lengths in tokens unless a name says otherwise. Log-probabilities are natural logarithms.
"""

from typing import Any, Literal

import msgspec
import numpy as np

# ---------------------------------------------------------------------------------------------- protocol


class Register(msgspec.Struct, tag="register", frozen=True):
    """Worker -> scheduler, first message: the services offered and the most requests in flight at once."""

    worker: str
    services: list[str]
    capacity: int
    pid: int
    host: str
    protocol: int = 1


class Registered(msgspec.Struct, tag="registered", frozen=True):
    """Scheduler -> worker: accepted; send a heartbeat at least every ``heartbeat_s`` seconds.

    ``admission`` names this membership. When it differs from the one before, the scheduler (a new one, or one that had given
    this worker up) has moved the earlier requests elsewhere, and the worker abandons them.
    """

    heartbeat_s: float
    admission: str = ""


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """Worker -> scheduler: alive. ``stats`` are monotonic counters and gauges named by the worker."""

    in_flight: int
    stats: dict[str, float]


class Request(msgspec.Struct, tag="request", frozen=True):
    """Scheduler -> worker: run ``service`` on the body; ``deadline_s`` seconds are left when it is sent."""

    id: int
    service: str
    deadline_s: float


class Result(msgspec.Struct, tag="result", frozen=True):
    """Worker -> scheduler: the answer to request ``id`` is the body."""

    id: int


FaultKind = Literal["infrastructure", "data"]


class Error(msgspec.Struct, tag="error", frozen=True):
    """Worker -> scheduler: request ``id`` failed. Infrastructure faults are retried elsewhere, data faults never."""

    id: int
    kind: FaultKind
    message: str


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Scheduler -> worker: stop work on request ``id``; no answer is expected."""

    id: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Either way. To a worker: finish what is in flight, then leave. From a worker: send no new requests."""


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """Worker -> scheduler: leaving now, nothing is in flight. Scheduler -> worker: rejected, with the reason."""

    reason: str = ""


Message = Register | Registered | Heartbeat | Request | Result | Error | Cancel | Drain | Goodbye

# ---------------------------------------------------------------------------------------------- generation


class Constraint(msgspec.Struct, frozen=True):
    """What a continuation must match from its first to its last token.

    kind "regex": ``text`` is a regular expression for the whole continuation. kind "json_schema": ``text`` is a JSON schema.
    """

    kind: Literal["regex", "json_schema"]
    text: str


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to sample. temperature 0 is greedy; top_p 1 and top_k 0 leave the distribution whole.

    constraint: tokens that cannot lead to a match have probability zero, and log-probabilities are of what is left.
    top_logprobs: how many of the most probable tokens each sample tells beside every token of its own, 0 to 20.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] = []
    seed: int | None = None
    constraint: Constraint | None = None
    top_logprobs: int = 0


class GenerateRequest(msgspec.Struct, frozen=True):
    """Service ``generate``: ``n`` independent continuations of one prefix. tokens: int32 [prefix]."""

    tokens: np.ndarray
    n: int
    sampling: Sampling


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One continuation.

    tokens: int32 [new], the sampled ids only. logprobs: float32 [new], of the distribution really sampled
    from (after temperature and top-p/k). versions: int32 [new], the policy version that sampled each token.
    finish: "stop" (a stop string or end-of-sequence token, kept in tokens), "length" or "abort".
    top: with ``Sampling.top_logprobs``, one entry a token: the most probable ids with their log-probabilities in the distribution that it
    was sampled from, descending; fewer than asked for where fewer have any probability.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: Literal["stop", "length", "abort"]
    top: list[dict[int, float]] | None = None


class GenerateResult(msgspec.Struct, frozen=True):
    """cached_tokens of the prompt_tokens were served from the prefix cache; the rest were prefilled."""

    samples: list[Sample]
    prompt_tokens: int
    cached_tokens: int


class LoadRequest(msgspec.Struct, frozen=True):
    """Service ``load``: take the weights in folder ``path`` as policy ``version``; ``digest`` proves arrival."""

    version: int
    path: str
    digest: str


class LoadResult(msgspec.Struct, frozen=True):
    """The digest of the weights that were taken, and how long the swap took.

    proof: the engine's own checksum of what it now holds, "" where it has none; actors of the same kind must give the same.
    """

    version: int
    digest: str
    seconds: float
    proof: str = ""


# ---------------------------------------------------------------------------------------------- judging


class JudgedTurn(msgspec.Struct, frozen=True):
    """What a judge sees of one turn.

    ``context`` is the text of the earlier turns as SLATE's judge reads it, ``transcript`` the same turns as the policy saw them, without
    the prompt; ``response`` the whole action as generated; think / query / answer its parsed parts (None when absent);
    ``observation`` what the environment answered (None when the turn is judged before that). ``step`` counts from 1 to ``budget``.
    ``evidence`` holds, one text a hop, the passages known to support the gold answer (empty when unknown).
    Of a game: ``state`` is the environment's state before the action as plain values, ``move`` the parsed action (None when it
    could not be read; it may be illegal).
    """

    question: str
    golds: list[str]
    context: str
    response: str
    step: int
    budget: int
    think: str | None = None
    query: str | None = None
    answer: str | None = None
    observation: str | None = None
    past_queries: list[str] = []
    past_observations: list[str] = []
    evidence: list[str] = []
    state: Any = None
    move: list[int] | None = None
    transcript: str = ""


class JudgeRequest(msgspec.Struct, frozen=True):
    """Service ``judge.<name>``: score a batch of turns."""

    turns: list[JudgedTurn]


class Judgement(msgspec.Struct, frozen=True):
    """Named scores of one turn. A column listed in ``invalid`` has no score: it is never silently zero."""

    scores: dict[str, float]
    invalid: list[str] = []
    explanation: str = ""


class JudgeResult(msgspec.Struct, frozen=True):
    """One judgement for each turn of the request, in order."""

    judgements: list[Judgement]


class RetrieveRequest(msgspec.Struct, frozen=True):
    """Service ``retrieve``: the ``topk`` nearest passages of each query."""

    queries: list[str]
    topk: int


class Passage(msgspec.Struct, frozen=True):
    """A corpus passage with its similarity to the query (inner product of unit vectors, in [-1, 1])."""

    id: str
    title: str
    text: str
    score: float


class RetrieveResult(msgspec.Struct, frozen=True):
    """passages[i] answers queries[i], best first."""

    passages: list[list[Passage]]


# ---------------------------------------------------------------------------------------------- playing


class PlayRequest(msgspec.Struct, frozen=True):
    """Service ``player.<name>``: an opponent's move. state: the environment's state as plain values; seed: of its randomness."""

    state: Any
    seed: int


class PlayResult(msgspec.Struct, frozen=True):
    """The chosen move, in the environment's own integers."""

    move: list[int]


# ---------------------------------------------------------------------------------------------- training


class TreeNode(msgspec.Struct, frozen=True):
    """A node of the prefix tree as it travels: only the tokens it adds.

    tokens: int32 [new]. For an action: logprobs float32 [new], versions int32 [new], sampled bool [new]
    (False where the token was forced, which has no sampling probability). parent -1 marks the root.
    """

    id: int
    parent: int
    kind: Literal["prompt", "action", "observation"]
    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    sampled: np.ndarray | None = None


class Turn(msgspec.Struct, frozen=True):
    """One trained turn: the action node, its place, and its scores (NaN never travels: a missing score is absent)."""

    node: int
    trajectory: int
    turn: int
    scores: dict[str, float]


class TrainGroup(msgspec.Struct, frozen=True):
    """Service ``train``: one finished group of turns of tree ``tree``.

    ``id`` is unique in the run and the key of exactly-once training. ``nodes`` are those nodes of the tree that
    this learner connection has not been sent yet, parents first; every other ancestor was sent before.
    """

    id: int
    tree: int
    nodes: list[TreeNode]
    turns: list[Turn]


class TreeClosed(msgspec.Struct, frozen=True):
    """Service ``close``: tree ``tree`` will emit no more; ``groups`` are the ids of all it emitted (maybe none)."""

    tree: int
    groups: list[int]


class Trained(msgspec.Struct, frozen=True):
    """Answer to ``train``: the group is part of policy ``version``; the weights are at ``path``.

    ``metrics`` and ``warnings`` are the update's (the same for every group of one update). A group that was already in the trained frontier is answered at once.
    """

    version: int
    path: str
    digest: str
    metrics: dict[str, float]
    warnings: list[str] = []


class Closed(msgspec.Struct, frozen=True):
    """Answer to ``close``: noted."""


SERVICES: dict[str, tuple[type, type]] = {
    "generate": (GenerateRequest, GenerateResult),
    "load": (LoadRequest, LoadResult),
    "retrieve": (RetrieveRequest, RetrieveResult),
    "judge": (JudgeRequest, JudgeResult),
    "player": (PlayRequest, PlayResult),
    "train": (TrainGroup, Trained),
    "close": (TreeClosed, Closed),
}
"""Request and result struct by service; a service named ``judge.<name>`` uses the row ``judge``, ``player.<name>`` likewise."""
