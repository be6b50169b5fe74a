"""The knowledge of the rule judges about supporting passages, each a text "Title\\nField: value" or
"Title\\nText", and about what a search showed."""

import re

from coppice.judges.exact_match import normalize

_FUNCTION_WORDS = frozenset(
    "of in is was and to what which who whose by for on it its with at from that this s name "
    "country".split()
)
_FIELD, _BEGINS = 3, 100
_INFORMATION = re.compile(r"</?information>")
_FRAME = re.compile(r"</?information>|Doc \d+\(Title:")
_DOCUMENT = re.compile(r"(?:^|\n)\s*Doc \d+(?=\(Title: )")


def content_words(text: str) -> set[str]:
    """Return the normalised words of a text without its function words."""
    return set(normalize(text).split()) - _FUNCTION_WORDS


def parts(evidence: str) -> tuple[str, str, str]:
    """Return title, field and value of a supporting passage. A text that does not begin with a
    field, of at most three words before a colon, is a value."""
    title, _, fact = evidence.partition("\n")
    field, colon, value = fact.partition(":")
    if not colon or len(field.split()) > _FIELD:
        field, value = "", fact
    return title.strip(), field.strip(), value.strip()


def shown(evidence: str, observations: list[str]) -> bool:
    """Return whether this passage was shown, as "(Title: T) Text", of which an observation may have
    the beginning alone."""
    title, _, fact = evidence.partition("\n")
    begins = f"(Title: {title.strip()}) {fact.strip()[:_BEGINS]}"
    return any(begins in seen for seen in observations)


def finds(query: str, evidence: str, question: str) -> float:
    """Return +1 if the query would find the passage, 0 if it names only a part of what finds it,
    and -1 if it names nothing of it. It finds the passage if it names every word of the field,
    together with the title or half of the value, and has no content word that neither the question
    nor the passage has. Without a field, the value is what the question and the passage share."""
    title, field, value = (
        content_words(part) or set(normalize(part).split()) for part in parts(evidence)
    )
    foreign = content_words(query) - content_words(question) - title - field - value
    if free := not field:
        value &= content_words(question)
    # with function words, because ".at" may be all that a value has
    words = set(normalize(query).split())
    # "national holiday" does not name the value of "National holiday: National Day"
    own = value - field or value
    names_field = free or field <= words
    names_title = bool(title) and title <= words
    names_value = bool(own) and 2 * len(own & words) >= len(own)
    if names_field and (names_title or names_value) and not foreign:
        return 1.0
    part = (value if free else field) & words
    return 0.0 if part or names_title or names_value else -1.0


def passages(observation: str) -> list[str]:
    """Return the passages of an information block, "(Title: T) text" each. A notice or an empty
    result has none."""
    return [text.strip() for text in _DOCUMENT.split(_INFORMATION.sub("", observation))[1:]]


def said(observation: str) -> str:
    """Return an information block without its tags and numbers."""
    return _FRAME.sub(" ", observation)


def holds(observation: str, golds: list[str]) -> bool:
    """Return whether an observation has a gold answer, word by word after normalisation."""
    words = f" {normalize(said(observation))} "
    return any(f" {gold} " in words for gold in map(normalize, golds) if gold)
