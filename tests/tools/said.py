"""What a command says."""

from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch
Said = Callable[..., str]
"""The fixtures ``said`` and ``refused`` of tests/tools/conftest.py."""


def words_of(
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], int],
    given: tuple[object, ...],
    status: int,
) -> str:
    """Run a command that ends with ``status``. Return what it says: on stdout, or on stderr where
    the status is not 0."""
    capsys.readouterr()
    try:
        ended = main([str(word) for word in given])
    except SystemExit as error:
        ended = error.code
    assert ended == status
    out, errors = capsys.readouterr()
    return errors if status else out
