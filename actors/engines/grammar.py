"""Constrained decoding: only those tokens are allowed that let a continuation match a regular
expression or a JSON schema.

Regular expressions are Rust's: classes are Unicode, ``.`` is any character but a line feed, and
there are no look-arounds or back-references. Every continuation also matches in Python's ``re``,
except that ``\\w`` here includes marks that Python's ``\\w`` lacks.
"""

import functools
import re

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from coppice.wire.faults import DataFault
from coppice.wire.messages import Constraint

KEPT = 64
"""Compiled constraints that are kept. Each client of a server may have its own."""
LONGEST = 50_000
"""The most characters of a constraint. Compiling a longer one would delay every other sample."""
_SHOWN = 200
"""An error shows at most this many characters of a constraint."""
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,12}"
"""Bounded, because a weak model might otherwise never stop writing white space."""


class Matcher:
    """Follows one continuation: ``mask``, sample, ``accept``, until ``done``."""

    def __init__(self, inner: LLMatcher, end_tokens: frozenset[int]):
        self._inner, self._end_tokens = inner, end_tokens

    def mask(self, logits: torch.Tensor) -> None:
        """Set the logits [vocabulary] of forbidden tokens to -inf, in place. End tokens are allowed
        where a match may end or where nothing else is."""
        allowed = self.allowed(len(logits))
        if not allowed.any():
            allowed[[token for token in self._end_tokens if token < len(allowed)]] = True
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Continue after ``token``. A forbidden token sets ``problem`` and ends the match."""
        self._inner.consume_token(token)

    @property
    def done(self) -> bool:
        """Whether only an end token can follow."""
        return self._inner.is_stopped()

    @property
    def problem(self) -> str:
        """The reason why the match was given up, "" if it was not."""
        return _reason(self._inner.get_error()) if self._inner.is_error() else ""

    def copy(self) -> "Matcher":
        """Return a matcher for another continuation from the same point."""
        return Matcher(self._inner.deep_copy(), self._end_tokens)

    def allowed(self, vocabulary: int) -> np.ndarray:
        """Return which tokens may come next, bool [vocabulary]."""
        packed = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        return np.unpackbits(packed, count=vocabulary, bitorder="little").astype(bool)


class Grammar:
    """Compiles constraints for one tokenizer. vocabulary: the number of logits."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: frozenset[int]):
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, end_tokens
        self._compiled = functools.lru_cache(KEPT)(self._compile)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a new matcher. Raises DataFault, which says what is wrong."""
        return self._compiled(constraint).copy()

    @functools.cached_property
    def _words(self) -> LLTokenizer:
        """Built for the first constraint: it takes a second for a large vocabulary."""
        size = max(self._vocabulary, 1 + max(self._tokenizer.get_vocab().values()))
        text, ends = self._tokenizer.to_str(), sorted(self._end_tokens)
        return LLTokenizer(text, n_vocab=size, eos_token=ends)

    def _compile(self, constraint: Constraint) -> Matcher:
        shown = constraint.text[:_SHOWN] + ("..." if len(constraint.text) > _SHOWN else "")
        named = f"{constraint.kind.replace('_', ' ')} {shown!r}"
        if len(constraint.text) > LONGEST:
            raise DataFault(
                f"{named}: {len(constraint.text)} characters are too many, expected at most"
                f" {LONGEST}"
            )
        if not self._end_tokens:
            raise DataFault(
                f"{named}: the model has no end-of-sequence token, so no match could end; set its"
                " eos_token_id"
            )
        if constraint.kind == "regex":
            source = LLMatcher.grammar_from_regex(constraint.text)
        else:
            space = {"whitespace_pattern": _JSON_WHITESPACE}
            try:
                source = LLMatcher.grammar_from_json_schema(constraint.text, overrides=space)
            except ValueError as error:
                raise DataFault(f"{named}: {error}; expected a JSON object or a boolean") from None
        inner = LLMatcher(self._words, source, log_level=0)
        matcher = Matcher(inner, self._end_tokens)
        # computed now, so that too large a grammar is refused here
        first = set(np.flatnonzero(matcher.allowed(self._vocabulary)).tolist())
        if matcher.problem:
            raise DataFault(f"{named}: {matcher.problem}")
        if first <= self._end_tokens and not inner.is_accepting():
            raise DataFault(f"{named}: {_reason('NoExtension')}")
        return matcher


def _reason(error: str) -> str:
    """Return the library's message in one line, without its state and the constraint."""
    reason = " ".join(re.split(r"<state>|\d* \| start: /", error)[0].split())
    if "NoExtension" in reason:
        return "no text of this tokenizer matches it"
    before = "error: " if "error: " in reason else "(in regex): "
    return reason.rpartition(before)[2][:_SHOWN]
