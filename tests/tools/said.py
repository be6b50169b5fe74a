"""The type of what tests/tools/conftest.py gives: the words of a command."""

from collections.abc import Callable

Said = Callable[..., str]
