"""PPR's process reward model: a language model that grades one turn by principles it weighs itself
(methods.md 2.2). A prompt is the rules, the question, the earlier turns, and then the turn with its
search's result, so that a server with a prefix cache computes each of them once."""

import re
from collections.abc import Mapping

from coppice.judges.llm import ChatEndpoint, ChatJudge, fill, read_prompts, room
from coppice.wire.messages import JudgedTurn, Judgement

_SCORE = re.compile(r"<final_score>((?:(?!<final_score>).)*?)</final_score>", re.DOTALL)
_PAIR = re.compile(r"\s*([0-9]{1,9})\s*,\s*([0-9]{1,9})\s*")
_PLACEHOLDERS = ("{query_str}", "{solution_str}")
_FINDINGS = r"[ -;=-~]"
"""A character of a constrained analysis: ASCII, so that it takes at most one token, but neither "<"
nor a line feed."""
_AROUND = len("Analysis: \nScores: <final_score>9,9</final_score>") + 1
"""The most tokens of a constrained reply besides its analysis, including the end token."""
_MOST = 2000
"""Characters of a constrained analysis after which a model only repeats itself."""
_LARGEST = 9
"""The largest M of a constrained reply."""


class PprmEndpoint(ChatEndpoint, frozen=True, forbid_unknown_fields=True):
    """An endpoint with the paper's number of attempts and reply length as defaults. ``patience_s``
    still limits them."""

    attempts: int = 10
    max_tokens: int = 4096
    backoff_s: float = 0.1


def parse_final_score(reply: str) -> tuple[int, int] | None:
    """Return S and M from the last score block of a reply, None when there is no block or it does
    not have two whole numbers with 0 <= S <= M and M > 0."""
    blocks = _SCORE.findall(reply)
    pair = _PAIR.fullmatch(blocks[-1]) if blocks else None
    if pair is None:
        return None
    reached, most = int(pair[1]), int(pair[2])
    return (reached, most) if 0 < most >= reached else None


def read_templates(
    own: Mapping[str, str] | None = None, *, principles: bool = True
) -> dict[str, str]:
    """Return the templates "system" and "user". own: paths of templates to use instead. principles:
    False is the ablation without principles."""
    if not principles and "system" in (own or {}):
        fault = "principles = false has no effect with an own system template"
        raise ValueError(f"judge pprm: {fault}: remove one of them")
    system = "pprm_system.txt" if principles else "pprm_system_no_principle.txt"
    texts = read_prompts("pprm", {"system": system, "user": "pprm_user.txt"}, own)
    for placeholder in _PLACEHOLDERS:
        if placeholder not in texts["user"]:
            wish = f"expected {' and '.join(_PLACEHOLDERS)}"
            raise ValueError(f"judge pprm: the user template has no {placeholder}: {wish}")
    return texts


def query_and_response(turn: JudgedTurn) -> tuple[str, str]:
    """Return the paper's query_str (the question and the transcript of earlier turns) and
    solution_str (the turn and its search result)."""
    query = f"{turn.question}\n\n{turn.transcript}" if turn.transcript else turn.question
    return query, turn.response + (turn.observation or "")


def messages(turn: JudgedTurn, texts: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the chat that asks for a turn's judgement. texts: see ``read_templates``."""
    query, response = query_and_response(turn)
    user = fill(texts["user"], query_str=query, solution_str=response)
    return [{"role": "system", "content": texts["system"]}, {"role": "user", "content": user}]


def reply_form(max_tokens: int) -> str:
    """Return the form of a reply as a regular expression, see ``judges.slate.reply_form``."""
    findings = f"{_FINDINGS}{{1,{min(room('pprm', max_tokens, _AROUND), _MOST)}}}"
    pairs = "|".join(f"[0-{most}],{most}" for most in range(1, _LARGEST + 1))
    return rf"Analysis: {findings}\nScores: <final_score>({pairs})</final_score>"


class Pprm(ChatJudge):
    """The LLM judge of PPR. The turn's score is S/M of a reply of two lines, "Analysis: .." and
    "Scores: <final_score>S,M</final_score>"; any other reply is invalid. templates: paths that
    replace the built-in "system" and "user". principles: False leaves the principles out."""

    name = "pprm"
    columns = ("process",)
    limits = (0.0, 1.0)

    def __init__(
        self,
        endpoint: PprmEndpoint,
        templates: dict[str, str] | None = None,
        principles: bool = True,
    ):
        self.templates = read_templates(templates, principles=principles)
        super().__init__(endpoint, reply_form)

    async def judge(self, turn: JudgedTurn) -> Judgement:
        system, user = (message["content"] for message in messages(turn, self.templates))
        reply, failure = await self.reply(user, system)
        pair = parse_final_score(reply)
        if pair is None:
            return Judgement({}, ["process"], failure or reply.strip())
        return Judgement({"process": pair[0] / pair[1]}, explanation=reply.strip())
