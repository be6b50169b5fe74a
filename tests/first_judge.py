"""The default run's judge as it was until one word of the evidence's field was not enough any more:
it paid queries for a wrong field. ``coppice trees --judge`` must expose it."""

from coppice.judges.evidence import content_words, parts, shown
from coppice.judges.exact_match import normalize
from coppice.judges.slate import SlateRules
from coppice.wire.messages import JudgedTurn


class FirstRules(SlateRules):
    name = "first_rules"

    def _query(self, turn: JudgedTurn) -> float:
        query = normalize(turn.query or "")
        if not query or "<" in (turn.query or "") or query in map(normalize, turn.past_queries):
            return -1.0
        missing = [one for one in turn.evidence if not shown(one, turn.past_observations)]
        if not missing:
            return -1.0
        title, field, value = (content_words(part) for part in parts(missing[0]))
        asked = content_words(query)
        place = title <= asked if title else False
        named = place or (bool(value) and len(value & asked) >= len(value) / 2)
        return float(bool(field & asked) + named) - 1.0
