"""Ranges of numbers as types: msgspec refuses a value outside its range when it converts a config
or the options of a plug-in."""

from typing import Annotated

from msgspec import Meta

LARGEST = 1e6
"""No score is larger or smaller than this: sums of squares of such numbers cannot overflow."""
LONGEST_TEXT = 2**17
"""The most characters of a passage, of a judge's explanation and of a speaker's reply."""
Positive = Annotated[float, Meta(gt=0)]
"""A number of more than 0."""
NotNegative = Annotated[float, Meta(ge=0)]
"""A number of at least 0."""
Share = Annotated[float, Meta(ge=0, le=1)]
"""A number from 0 to 1, both included."""
Part = Annotated[float, Meta(gt=0, le=1)]
"""A number of more than 0 and at most 1."""
Discount = Annotated[float, Meta(ge=0, lt=1)]
"""A number of at least 0 and less than 1."""
Count = Annotated[int, Meta(ge=1)]
"""A whole number of at least 1."""
Natural = Annotated[int, Meta(ge=0)]
"""A whole number of at least 0."""
Ddof = Annotated[int, Meta(ge=0, le=1)]
"""Which standard deviation divides: the sample's (1: the sum of squares over n - 1) or the
population's (0: over n). docs/learner.md says why."""
