"""PPR's process reward model: a language model that grades one turn by principles it weighs itself (methods.md 2.2).

Its reply is two lines, "Analysis: .." and "Scores: <final_score>S,M</final_score>"; the turn's score is S/M. Whatever is not two whole
numbers with 0 <= S <= M and M > 0 in the last score block is invalid: the scheme says what becomes of it.

A prompt is the rules, then the question and the turns before, then the turn with what its search found: a server that caches prefixes
computes the rules once a run and each turn's text once a trajectory.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping

from judges import templates as files
from judges.base import Judge
from judges.llm import ChatClient, ChatEndpoint, validity
from wire.messages import JudgedTurn, Judgement

_SCORE = re.compile(r"<final_score>((?:(?!<final_score>).)*?)</final_score>", re.DOTALL)
_PAIR = re.compile(r"\s*([0-9]{1,9})\s*,\s*([0-9]{1,9})\s*")
_PLACEHOLDERS = ("{query_str}", "{solution_str}")
_FINDINGS = r"[ -;=-~]"
"""A character of constrained findings: ASCII, so that none takes more than one token, without "<", on one line."""
_AROUND = len("Analysis: \nScores: <final_score>9,9</final_score>") + 1
"""The most tokens of a constrained reply beside its findings, with the end token."""
_FEWEST, _MOST = 16, 2000
"""Characters of constrained findings: room that they must have, and room after which a model only repeats itself."""
_LARGEST = 9
"""The greatest M of a constrained reply."""


class PprmEndpoint(ChatEndpoint, frozen=True, forbid_unknown_fields=True):
    """Where and how to ask, with the paper's tries and length, as far as ``patience_s`` lets them."""

    attempts: int = 10
    max_tokens: int = 4096
    backoff_s: float = 0.1


def parse_final_score(reply: str) -> tuple[int, int] | None:
    """S and M from the last score block of a reply; None when there is no block or it holds anything else."""
    blocks = _SCORE.findall(reply)
    found = _PAIR.fullmatch(blocks[-1]) if blocks else None
    if found is None:
        return None
    reached, most = int(found[1]), int(found[2])
    return (reached, most) if 0 < most >= reached else None


def read_templates(own: Mapping[str, str] | None = None, *, principles: bool = True) -> dict[str, str]:
    """The texts "system" and "user". own: paths that replace them. principles False: the ablation without any principle."""
    if not principles and "system" in (own or {}):
        raise ValueError("judge pprm: principles = false has no effect with an own system template: remove one of them")
    system = "pprm_system.txt" if principles else "pprm_system_no_principle.txt"
    texts = files.read("pprm", {"system": system, "user": "pprm_user.txt"}, dict(own or {}))
    for placeholder in _PLACEHOLDERS:
        if placeholder not in texts["user"]:
            raise ValueError(
                f"judge pprm: the user template has no {placeholder}: expected {' and '.join(_PLACEHOLDERS)}"
            )
    return texts


def query_and_response(turn: JudgedTurn) -> tuple[str, str]:
    """The paper's query_str, the bare question with the transcript of the turns before, and solution_str, the turn with what it found."""
    query = f"{turn.question}\n\n{turn.transcript}" if turn.transcript else turn.question
    return query, turn.response + (turn.observation or "")


def messages(turn: JudgedTurn, texts: Mapping[str, str]) -> list[dict[str, str]]:
    """The chat that asks for a turn's judgement. texts: see ``read_templates``."""
    query, response = query_and_response(turn)
    user = files.fill(texts["user"], query_str=query, solution_str=response)
    return [{"role": "system", "content": texts["system"]}, {"role": "user", "content": user}]


def reply_form(max_tokens: int) -> str:
    """The output contract as a regular expression whose every match fits in ``max_tokens``. Raises ValueError for too few."""
    room = min(max_tokens - _AROUND, _MOST)
    if room < _FEWEST:
        raise ValueError(f"judge pprm: max_tokens {max_tokens}: a constrained reply needs {_AROUND + _FEWEST} or more")
    pairs = "|".join(f"[0-{most}],{most}" for most in range(1, _LARGEST + 1))
    return rf"Analysis: {_FINDINGS}{{1,{room}}}\nScores: <final_score>({pairs})</final_score>"


class Pprm(Judge):
    """The LLM judge of PPR. templates: paths that replace the built-in "system" and "user". principles: False leaves them out.

    With ``endpoint.constrain`` the server holds every reply to the output contract, so that a small model's can be read too.
    """

    name = "pprm"
    columns = ("process",)
    concurrency = 64
    batch = 8

    def __init__(
        self, endpoint: PprmEndpoint, templates: dict[str, str] | None = None, principles: bool = True
    ):  # fmt: skip
        self.templates = read_templates(templates, principles=principles)
        self.client = ChatClient(endpoint)
        self.form = reply_form(endpoint.max_tokens) if endpoint.constrain else ""
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    def messages(self, turn: JudgedTurn) -> list[dict[str, str]]:
        """The chat that asks for a turn's judgement."""
        return messages(turn, self.templates)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return list(await asyncio.gather(*(self._judge(turn) for turn in turns)))

    async def _judge(self, turn: JudgedTurn) -> Judgement:
        system, user = (message["content"] for message in self.messages(turn))
        reply, failure = await self.client.reply_or_failure(user, self.form, system=system)
        self.counts["judged"] += 1
        pair = parse_final_score(reply)
        if pair is None:
            self.counts["failed" if failure else "unparsed"] += 1
            return Judgement({}, ["process"], failure or reply.strip())
        return Judgement({"process": pair[0] / pair[1]}, explanation=reply.strip())

    def stats(self) -> dict[str, float]:
        """Counters for the heartbeat; judge_valid_rate is valid turns over judged ones."""
        return validity(self.counts)
