"""What the tests of the commands share."""

from collections.abc import Callable

import pytest

from tests.tools.said import Said


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command that ends with ``status``. Give what it says: on stdout, or on stderr where the
    status is not 0."""

    def of(main: Callable[[list[str]], int], *words: object, status: int = 0) -> str:
        capsys.readouterr()
        try:
            ended = main([str(word) for word in words])
        except SystemExit as error:
            ended = error.code
        assert ended == status
        out, errors = capsys.readouterr()
        return errors if status else out

    return of


@pytest.fixture
def refused(said: Said) -> Said:
    """Run a command that refuses its words. Give the one line that it says."""

    def of(main: Callable[[list[str]], int], *words: object) -> str:
        line = said(main, *words, status=2)
        assert line.count("\n") == 1
        return line

    return of
