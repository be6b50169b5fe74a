"""Every message that crosses a process boundary: ZeroMQ frames ``[header, body, array, ...]``. The
header is a tagged ``Message`` struct; a body is a struct of ``SERVICES`` with its arrays as raw
frames (``wire.arrays``). Times are in seconds, lengths in tokens, log-probabilities natural."""

from typing import Any, Literal

import msgspec
import numpy as np

# protocol


class Register(msgspec.Struct, tag="register", frozen=True):
    """Worker -> scheduler, the first message: the services that the worker offers, and how many
    requests it takes at once."""

    worker: str
    services: list[str]
    capacity: int
    pid: int
    host: str
    protocol: int = 1


class Registered(msgspec.Struct, tag="registered", frozen=True):
    """Scheduler -> worker: the worker is accepted and sends a heartbeat at least every
    ``heartbeat_s`` seconds. ``admission`` names this membership. When it changes, the scheduler is
    new or had given this worker up and moved its requests, so the worker abandons them."""

    heartbeat_s: float
    admission: str = ""


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """Worker -> scheduler: the worker is alive. ``stats``: counters and gauges that it names. The
    scheduler answers with a heartbeat whose ``echo`` is newer than every request before it. The
    worker returns the newest echo with its ``open`` requests: a request that is older than the echo
    and not open was lost with a connection, or its answer was."""

    in_flight: int
    stats: dict[str, float]
    open: list[int] = []
    echo: int = 0


class Request(msgspec.Struct, tag="request", frozen=True):
    """Scheduler -> worker: run ``service`` on the body within ``deadline_s`` seconds."""

    id: int
    service: str
    deadline_s: float


class Result(msgspec.Struct, tag="result", frozen=True):
    """Worker -> scheduler: the answer to request ``id`` is the body."""

    id: int


FaultKind = Literal["infrastructure", "data"]


class Error(msgspec.Struct, tag="error", frozen=True):
    """Worker -> scheduler: request ``id`` failed (``wire.faults`` has the kinds)."""

    id: int
    kind: FaultKind
    message: str


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Scheduler -> worker: stop working on request ``id`` and send no answer."""

    id: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """To a worker: finish the open requests, then leave. From a worker: send no new requests."""


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """Worker -> scheduler: the worker leaves now and has no open request. Scheduler -> worker: the
    worker is rejected for this reason."""

    reason: str = ""


Message = Register | Registered | Heartbeat | Request | Result | Error | Cancel | Drain | Goodbye

# generation


class Constraint(msgspec.Struct, frozen=True):
    """The form that a continuation must match as a whole: a regular expression or a JSON schema."""

    kind: Literal["regex", "json_schema"]
    text: str


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to sample. Temperature 0 is greedy; top_p 1 and top_k 0 leave the distribution whole.

    constraint: tokens that cannot lead to a match get probability zero, and log-probabilities refer
    to the renormalised rest. top_logprobs: the most probable tokens (0 to 20) that the sample
    reports for every sampled token. support: whether the sample reports which tokens top-p and
    top-k left. experts_from: the first position of prefix and continuation whose experts it
    reports, -1 for none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] = []
    seed: int | None = None
    constraint: Constraint | None = None
    top_logprobs: int = 0
    support: bool = False
    experts_from: int = -1

    @property
    def cuts(self) -> bool:
        """Whether top-p or top-k cut the distribution. They never cut greedy sampling, whose argmax
        stays the same."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


class GenerateRequest(msgspec.Struct, frozen=True):
    """Service ``generate``: sample ``n`` independent continuations of one prefix, int32 [prefix].
    images: the PNG bytes of every picture in the prefix, by its number (``common.vision``)."""

    tokens: np.ndarray
    n: int
    sampling: Sampling
    images: dict[int, bytes] = {}


NO_EXPERT = -1
"""Stands in arrays of experts where none was chosen or told."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One continuation.

    tokens: int32 [new], the sampled ids only. logprobs: float32 [new], under the distribution that
    was really sampled from (after temperature and top-p/k). versions: int32 [new], the policy
    version that sampled each token. finish: "stop" (a stop string or end-of-sequence token, which
    stays in tokens), "length" or "abort". top: per token the ``Sampling.top_logprobs`` most
    probable ids with their log-probabilities, descending; fewer when fewer have any probability.
    support: the tokens that top-p and top-k left at each place (``common.support``), b"" if they
    cut nothing anywhere, None if the engine does not report it. experts: int16 [positions, layers
    * k], those of all positions from ``Sampling.experts_from`` to the last token but one
    (``common.routing``); None if not asked for, or if the engine does not report them.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: Literal["stop", "length", "abort"]
    top: list[dict[int, float]] | None = None
    support: bytes | None = None
    experts: np.ndarray | None = None


class GenerateResult(msgspec.Struct, frozen=True):
    """The answer to ``generate``. The prefix cache held ``cached_tokens`` of the ``prompt_tokens``.
    phases: the seconds that the request spent in "queue", "prefill" and "decode"; {} if the engine
    cannot tell them apart."""

    samples: list[Sample]
    prompt_tokens: int
    cached_tokens: int
    phases: dict[str, float] = {}


class LoadRequest(msgspec.Struct, frozen=True):
    """Service ``load``: use the weights in folder ``path`` as policy ``version``. ``digest`` proves
    that the right weights arrived."""

    version: int
    path: str
    digest: str


class LoadResult(msgspec.Struct, frozen=True):
    """The answer to ``load``: the digest of the weights now in use, and how long the swap took.
    proof: the engine's own checksum of its weights, "" if it has none. Actors of one kind must
    report equal proofs."""

    version: int
    digest: str
    seconds: float
    proof: str = ""


# judging


class JudgedTurn(msgspec.Struct, frozen=True):
    """What a judge sees of one turn.

    ``context`` is the text of the earlier turns as SLATE's judge reads it; ``transcript`` holds
    them as the policy saw them, without the prompt. ``response`` is the whole action as generated;
    think, query and answer are its parsed parts (None when absent). ``observation`` is the
    environment's answer (None when the turn is judged before it). ``step`` counts from 1 to
    ``budget``. ``evidence``: one text per hop that supports the gold answer (empty when unknown).
    In a game, ``state`` is the state before the action as plain values, and ``move`` is the parsed
    action (None when it could not be read; it may be illegal).
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
    """Named scores of one turn. A column in ``invalid`` has no score; a missing score is never
    silently zero."""

    scores: dict[str, float]
    invalid: list[str] = []
    explanation: str = ""


class JudgeResult(msgspec.Struct, frozen=True):
    """One judgement for each turn of the request, in order."""

    judgements: list[Judgement]


TOPK_MOST = 1000
"""Passages of a query: of a large index all of them would fill the memory."""


class RetrieveRequest(msgspec.Struct, frozen=True):
    """Service ``retrieve``: find the ``topk`` nearest passages of each query, at most
    ``TOPK_MOST``."""

    queries: list[str]
    topk: int


class Passage(msgspec.Struct, frozen=True):
    """A corpus passage with its similarity to the query (inner product of unit vectors, in [-1,
    1])."""

    id: str
    title: str
    text: str
    score: float

    def listed(self, scored: bool) -> dict[str, Any]:
        """Return the passage as the Search-R1 protocol has it (methods.md 1.8), with its score or
        without. Its contents are the quoted title, a newline, and the text."""
        document = {"id": self.id, "contents": f'"{self.title}"\n{self.text}'}
        return {"document": document, "score": self.score} if scored else document


class RetrieveResult(msgspec.Struct, frozen=True):
    """The answer to ``retrieve``: passages[i] belongs to queries[i], best first."""

    passages: list[list[Passage]]


# playing


class PlayRequest(msgspec.Struct, frozen=True):
    """Service ``player.<name>``: choose the opponent's move in ``state`` (plain values). seed:
    decides all randomness."""

    state: Any
    seed: int


class PlayResult(msgspec.Struct, frozen=True):
    """The chosen move, as the integers that the environment uses."""

    move: list[int]


class SpeakRequest(msgspec.Struct, frozen=True):
    """Service ``speaker.<name>``: reply to chat messages. max_tokens: of the reply. stop: strings
    before which the reply ends. seed: decides all randomness, if the speaker can be seeded."""

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    stop: list[str]
    seed: int


class SpeakResult(msgspec.Struct, frozen=True):
    """The reply, without the stop string that ended it."""

    text: str


# training


class TreeNode(msgspec.Struct, frozen=True, gc=False):
    """A node of the prefix tree as it is sent. It holds only the tokens that it adds.

    tokens: int32 [new]. An action also has logprobs float32 [new], versions int32 [new] and sampled
    bool [new] (False for a forced token). The root has parent -1. images: the PNG bytes of the
    pictures among the tokens, by number (``common.vision``). support: as in ``Sample``. experts:
    int16 [new * layers * k], of the position before each token (``common.routing``); None if they
    are unknown.
    """

    id: int
    parent: int
    kind: Literal["prompt", "action", "observation"]
    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    sampled: np.ndarray | None = None
    images: dict[int, bytes] = {}
    support: bytes = b""
    experts: np.ndarray | None = None


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One trained turn: the action node, its place, and its scores (a missing score is left out;
    NaN is never sent). anchor: equal for turns taken in the same situation of their tree; None
    where the tokens of the observation decide it."""

    node: int
    trajectory: int
    turn: int
    scores: dict[str, float]
    anchor: int | None = None


class TrainGroup(msgspec.Struct, frozen=True):
    """Service ``train``: one finished group of turns of tree ``tree``. ``id`` is unique in the run,
    and by it each group is trained exactly once. ``nodes`` are the nodes of the turns and those of
    their ancestors that were not yet sent over this connection, parents first."""

    id: int
    tree: int
    nodes: list[TreeNode]
    turns: list[Turn]


class TreeClosed(msgspec.Struct, frozen=True):
    """Service ``close``: tree ``tree`` emits no more groups. ``groups``: the ids of all that it
    emitted. replaced: another question takes the place of this one, and its groups go into the
    frontier with the next update, without loss."""

    tree: int
    groups: list[int]
    replaced: bool = False


class Trained(msgspec.Struct, frozen=True):
    """The answer to ``train``: the group has been trained into policy ``version``, whose weights
    are at ``path``. ``metrics`` and ``warnings`` are those of the update. A group that was trained
    before is answered at once, with the version that trained it."""

    version: int
    path: str
    digest: str
    metrics: dict[str, float]
    warnings: list[str] = []


class Closed(msgspec.Struct, frozen=True):
    """The answer to ``close``."""


SERVICES: dict[str, tuple[type, type]] = {
    "generate": (GenerateRequest, GenerateResult),
    "load": (LoadRequest, LoadResult),
    "retrieve": (RetrieveRequest, RetrieveResult),
    "judge": (JudgeRequest, JudgeResult),
    "player": (PlayRequest, PlayResult),
    "speaker": (SpeakRequest, SpeakResult),
    "train": (TrainGroup, Trained),
    "close": (TreeClosed, Closed),
}
"""The request and result struct of each service. A service ``judge.<name>`` uses the row ``judge``;
``player`` and ``speaker`` work alike."""
REPEATABLE = ("judge", "player", "speaker", "retrieve")
"""The services whose answers change nothing, so that two workers may run one request at once."""
