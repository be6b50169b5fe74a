"""What the tests of the commands share."""

from collections.abc import Callable

import pytest

from tests.tools.said import Said, words_of

Main = Callable[[list[str]], int]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command: ``said(main, "--json", status=1)``. See words_of."""

    def of(main: Main, *given: object, status: int = 0) -> str:
        return words_of(capsys, main, given, status)

    return of


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command that refuses its words. Give the one line that it says."""

    def of(main: Main, *given: object) -> str:
        line = words_of(capsys, main, given, 2)
        assert line.count("\n") == 1
        return line

    return of
