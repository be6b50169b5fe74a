"""SLATE's judge: two ternary scores per turn from a language model, strictly parsed (methods.md
1.3).

A search is judged by its think and its query, an answer by its think and its answer. A reply is
invalid unless its last score block is exactly -1, 0 or +1. The strategy counts invalid scores and
decides what they become.

The built-in prompts have the same order: the rules of all three components, the context, then the
graded text. A server that caches prefixes computes the rules once per run, each addition to the
context once, and per prompt only the graded text.
"""

import asyncio
import re

from coppice.judges.llm import ChatEndpoint, ChatJudge
from coppice.judges.templates import fill, read
from coppice.wire.messages import JudgedTurn, Judgement

_SCORE = re.compile(r"<score>(.*?)</score>", re.DOTALL)
_TERNARY = re.compile(r"\s*([+-]?1|[+-]?0)\s*")
_REASONS = r"[\n -;=-~]"
"""A character of a constrained explanation: ASCII, so that it takes at most one token, but not "<".
"""
_AROUND = len("<explanation></explanation>\n<score>+1</score>") + 1
"""The most tokens of a constrained reply besides its explanation, including the end token."""
_FEWEST = 16
"""The least room, in characters, that a constrained explanation needs."""


def parse_score(reply: str) -> float | None:
    """Return -1, 0 or 1 from the last score block of a reply, None when there is no block or it has
    any other content."""
    blocks = _SCORE.findall(reply)
    score = _TERNARY.fullmatch(blocks[-1]) if blocks else None
    return float(score[1]) + 0.0 if score else None


def reply_form(max_tokens: int) -> str:
    """Return the form of a reply as a regular expression. Every match fits in ``max_tokens``.
    Raises ValueError if they are too few."""
    room = max_tokens - _AROUND
    if room < _FEWEST:
        raise ValueError(
            f"judge slate: max_tokens {max_tokens}: a constrained reply needs {_AROUND + _FEWEST} or more"
        )
    return rf"<explanation>{_REASONS}{{1,{room}}}</explanation>\n?<score>(\+1|0|-1)</score>"


class Slate(ChatJudge):
    """The LLM judge. templates: by component name, paths that replace the built-in templates.

    With ``endpoint.constrain`` the server keeps every reply to the required form, so that even a
    small model's replies can be read.
    """

    name = "slate"
    columns = ("think", "query", "answer")

    def __init__(self, endpoint: ChatEndpoint, templates: dict[str, str] | None = None):
        self.templates = read(
            "slate", {column: f"slate_{column}.txt" for column in self.columns}, templates
        )
        super().__init__(endpoint, reply_form)

    def prompts(self, turn: JudgedTurn) -> dict[str, str]:
        """Return the two prompts of a turn, by column."""
        context, think = turn.context or "None", turn.think or "None"
        prompts = {"think": self._fill("think", context=context, thinking=think)}
        if turn.answer is not None:
            golds = "; ".join(turn.golds)
            prompts["answer"] = self._fill(
                "answer", context=context, ground_truth=golds, predicted_answer=turn.answer
            )
        else:
            prompts["query"] = self._fill(
                "query", context=context, thinking=think, query=turn.query or "None"
            )
        return prompts

    def _fill(self, column: str, **values: str) -> str:
        return fill(self.templates[column], **values)

    async def judge(self, turn: JudgedTurn) -> Judgement:
        prompts = self.prompts(turn)
        replies = await asyncio.gather(
            *(self.client.reply_or_failure(prompt, self.form) for prompt in prompts.values())
        )
        scores, invalid, notes = {}, [], []
        for column, (reply, failure) in zip(prompts, replies, strict=True):
            value = parse_score(reply)
            self.counts["judged"] += 1
            if value is None:
                self.counts["failed" if failure else "unparsed"] += 1
                invalid.append(column)
            else:
                scores[column] = value
            notes.append(f"[{column}] {failure or reply.strip()}")
        return Judgement(scores, invalid, "\n".join(notes))
