"""Constrained decoding: which tokens may come next, so that a continuation matches a regular expression or a JSON schema.

A ``Grammar`` belongs to one tokenizer and compiles constraints; a ``Matcher`` follows one sample:

    matcher = grammar.matcher(constraint)
    while not matcher.done:
        matcher.mask(logits)              # forbidden tokens become -inf
        matcher.accept(sample(logits))

Regular expressions are Rust's: Unicode classes, ``.`` any character but a line feed, no look-around and no back-references.
A continuation is always also a match in ``re``, but for ``\\w``, which has marks that Python's lacks.
"""

import functools
import re

import llguidance
import numpy as np
import tokenizers
import torch

from wire.faults import DataFault
from wire.messages import Constraint

KEPT = 64
"""Compiled constraints kept: a run uses a handful, a server's clients may each bring their own."""
LONGEST = 50_000
"""Characters of a constraint: a larger one would hold up every other sample while it compiles."""
_SHOWN = 200
"""Characters of a constraint shown in an error."""
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,12}"
"""Between JSON tokens. Bounded, because a weak model may never leave a whitespace that it may always continue."""


class Matcher:
    """Follows one continuation. ``mask``, then ``accept`` what was sampled, until ``done``."""

    def __init__(self, inner: llguidance.LLMatcher, end_tokens: frozenset[int]):
        self._inner, self._end_tokens = inner, end_tokens

    def mask(self, logits: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place. logits: [vocabulary], on any device, of any float type.

        End tokens stay allowed exactly where a match may end, and where nothing else is possible.
        """
        allowed = self._allowed(len(logits))
        if not allowed.any():
            allowed[[token for token in self._end_tokens if token < len(allowed)]] = True
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Go on behind ``token``, which the mask allowed. A forbidden one sets ``problem`` and ends the match."""
        self._inner.consume_token(token)

    @property
    def done(self) -> bool:
        """Nothing but an end token can follow."""
        return self._inner.is_stopped()

    @property
    def problem(self) -> str:
        """Why the match was given up (a grammar that grew too large on the way, a forbidden token); "" while all is well."""
        return _reason(self._inner.get_error()) if self._inner.is_error() else ""

    def copy(self) -> "Matcher":
        """Another continuation from the same point."""
        return Matcher(self._inner.deep_copy(), self._end_tokens)

    def allowed(self, vocabulary: int) -> list[int]:
        """The tokens that may come next, for tests and for reading."""
        return np.flatnonzero(self._allowed(vocabulary)).tolist()

    def _allowed(self, vocabulary: int) -> np.ndarray:
        """bool [vocabulary]."""
        packed = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, count=vocabulary, bitorder="little")
        return bits.astype(bool)


class Grammar:
    """Compiles constraints for one tokenizer. vocabulary: the number of logits, which may exceed the tokenizer's."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: int, end_tokens: frozenset[int]):
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, end_tokens
        self._compiled = functools.lru_cache(KEPT)(self._compile)

    def matcher(self, constraint: Constraint) -> Matcher:
        """A new match of ``constraint``. Raises DataFault naming what is wrong with it."""
        return self._compiled(constraint).copy()

    @functools.cached_property
    def _words(self) -> llguidance.LLTokenizer:
        """The tokenizer as bytes by token; built when the first constraint comes (a second for a large vocabulary)."""
        size = max(self._vocabulary, 1 + max(self._tokenizer.get_vocab().values()))
        return llguidance.LLTokenizer(self._tokenizer.to_str(), n_vocab=size, eos_token=sorted(self._end_tokens))

    def _compile(self, constraint: Constraint) -> Matcher:
        shown = constraint.text if len(constraint.text) <= _SHOWN else f"{constraint.text[:_SHOWN]}..."
        named = f"{constraint.kind.replace('_', ' ')} {shown!r}"
        if len(constraint.text) > LONGEST:
            raise DataFault(f"{named}: {len(constraint.text)} characters are too many, expected at most {LONGEST}")
        if not self._end_tokens:
            raise DataFault(
                f"{named}: the model has no end-of-sequence token, so no match could end; set its eos_token_id"
            )
        inner = llguidance.LLMatcher(self._words, _source(constraint, named), log_level=0)
        matcher = Matcher(inner, self._end_tokens)
        first = set(matcher.allowed(self._vocabulary))  # what is too large shows itself here, not at the first token
        if matcher.problem:
            raise DataFault(f"{named}: {matcher.problem}")
        if first <= self._end_tokens and not inner.is_accepting():
            raise DataFault(f"{named}: {_reason('NoExtension')}")
        return matcher


def _source(constraint: Constraint, named: str) -> str:
    """The constraint in the library's own grammar language."""
    if constraint.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(constraint.text)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            constraint.text, overrides={"whitespace_pattern": _JSON_WHITESPACE}
        )
    except ValueError as error:
        raise DataFault(f"{named}: {error}; expected a JSON object or a boolean") from None


def _reason(error: str) -> str:
    """The library's message in one line, without the dump of its state and without the constraint, which is named anyway."""
    said = " ".join(re.split(r"<state>|\d* \| start: /", error)[0].split())
    if "NoExtension" in said:
        return "no text of this tokenizer matches it"
    said = said.rpartition("error: ")[2] if "error: " in said else said.rpartition("(in regex): ")[2]
    return said[:_SHOWN]
