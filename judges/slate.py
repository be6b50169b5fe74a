"""SLATE's judge: two ternary scores a turn from a language model, strictly parsed (methods.md 1.3).

A search is judged by its think and its query, an answer by its think and its answer. Whatever is not exactly -1, 0 or +1 in
the last score block is invalid: the strategy counts it and says what it becomes.

The built-in prompts begin alike: the rules of all three components, then the context, then what is graded. A server that caches prefixes
computes the rules once a run, what a context adds to the one before once, and per prompt only the graded text.
"""

import asyncio
import re
from collections import Counter

from judges.base import Judge
from judges.llm import ChatClient, ChatEndpoint, validity
from judges.templates import fill, read
from wire.messages import JudgedTurn, Judgement

_SCORE = re.compile(r"<score>(.*?)</score>", re.DOTALL)
_TERNARY = re.compile(r"\s*([+-]?1|[+-]?0)\s*")
_REASONS = r"[\n -;=-~]"
"""A character of constrained reasons: ASCII, so that none takes more than one token, and no "<"."""
_AROUND = len("<explanation></explanation>\n<score>+1</score>") + 1
"""The most tokens of a constrained reply beside its reasons, with the end token."""
_FEWEST = 16
"""Characters that constrained reasons must have room for."""


def parse_score(reply: str) -> float | None:
    """-1, 0 or 1 from the last score block of a reply; None when there is no block or it holds anything else."""
    blocks = _SCORE.findall(reply)
    found = _TERNARY.fullmatch(blocks[-1]) if blocks else None
    return float(found[1]) + 0.0 if found else None


def reply_form(max_tokens: int) -> str:
    """The output contract as a regular expression whose every match fits in ``max_tokens``. Raises ValueError for too few."""
    room = max_tokens - _AROUND
    if room < _FEWEST:
        raise ValueError(f"judge slate: max_tokens {max_tokens}: a constrained reply needs {_AROUND + _FEWEST} or more")
    return rf"<explanation>{_REASONS}{{1,{room}}}</explanation>\n?<score>(\+1|0|-1)</score>"


class Slate(Judge):
    """The LLM judge. templates: paths by component name that replace the built-in ones.

    With ``endpoint.constrain`` the server holds every reply to the output contract, so that a small model's can be read too.
    """

    name = "slate"
    columns = ("think", "query", "answer")
    concurrency = 64
    batch = 8

    def __init__(self, endpoint: ChatEndpoint, templates: dict[str, str] | None = None):
        self.templates = read("slate", {column: f"slate_{column}.txt" for column in self.columns}, templates)
        self.client = ChatClient(endpoint)
        self.form = reply_form(endpoint.max_tokens) if endpoint.constrain else ""
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    def prompts(self, turn: JudgedTurn) -> dict[str, str]:
        """The two prompts of a turn, by column."""
        context, think = turn.context or "None", turn.think or "None"
        made = {"think": self._fill("think", context=context, thinking=think)}
        if turn.answer is not None:
            golds = "; ".join(turn.golds)
            made["answer"] = self._fill("answer", context=context, ground_truth=golds, predicted_answer=turn.answer)
        else:
            made["query"] = self._fill("query", context=context, thinking=think, query=turn.query or "None")
        return made

    def _fill(self, column: str, **values: str) -> str:
        return fill(self.templates[column], **values)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return list(await asyncio.gather(*(self._judge(turn) for turn in turns)))

    async def _judge(self, turn: JudgedTurn) -> Judgement:
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

    def stats(self) -> dict[str, float]:
        """Counters for the heartbeat; judge_valid_rate is valid components over judged ones."""
        return validity(self.counts)
