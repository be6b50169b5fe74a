"""The rule judge of our own SOTOPIA scenarios: it checks what each scenario's rules can check in
the words that were said, and no more.

The goal is 10 if all its conditions hold and 0 otherwise. The secret is -10 if the agent said what
reveals it and 0 otherwise, for scenarios whose rules know such words. The other five dimensions are
missing, because no rule can judge them. It matches words: it neither understands a paraphrase nor
notices that a word was quoted, denied or meant otherwise.
"""

import re

import msgspec

from coppice.actors.environments.sotopia.conversation import Conversation
from coppice.actors.environments.sotopia.scenarios import Condition
from coppice.judges.base import RuleJudge
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, Judgement


def holds(condition: Condition, own: list[str], other: list[str]) -> bool:
    """Return whether a condition of an agent's goal holds, given the words that each side said, in
    order."""
    whose = {"self": own, "partner": other, "each": own + other}[condition.by]
    if condition.says:
        return any(re.search(condition.says, words, re.IGNORECASE) for words in whose)
    if condition.never:
        return not any(re.search(condition.never, words, re.IGNORECASE) for words in whose)
    last = [
        [float(n) for words in said for n in re.findall(condition.agreed, words, re.IGNORECASE)][
            -1:
        ]
        for said in (own, other)
    ]
    return bool(last[0]) and last[0] == last[1] and condition.least <= last[0][0] <= condition.most


class SotopiaRules(RuleJudge):
    """Columns of the trained side: outcome (goal / 10), goal and, where it can be checked, secret."""

    name = "sotopia_rules"
    columns = ("outcome", "goal", "secret")
    environments = ("sotopia",)

    def judge(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of a conversation. Raises DataFault for a scenario without rules."""
        whole = msgspec.convert(turn.state, Conversation)
        if whole.rules is None:
            raise DataFault(
                "judge sotopia_rules: the scenario has no rules to check; use the judge sotopia"
            )
        rules, side = whole.rules[whole.trained], whole.trained
        own, other = (
            [t.argument for t in whole.turns if t.side == s and t.kind == "speak"]
            for s in (side, 1 - side)
        )
        results = [holds(condition, own, other) for condition in rules.goal]
        goal = 10.0 if all(results) else 0.0
        scores = {"outcome": goal / 10, "goal": goal}
        if rules.secret:
            revealed = any(re.search(rules.secret, words, re.IGNORECASE) for words in own)
            scores["secret"] = -10.0 if revealed else 0.0
        met = [
            f"{'holds' if result else 'fails'}: {c}"
            for c, result in zip(rules.goal, results, strict=True)
        ]
        return Judgement(scores, explanation="\n".join(met))
