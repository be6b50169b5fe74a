"""What a command says."""

import typing
from collections.abc import Callable
from typing import Any

import msgspec
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


def known_setting(kind: Any, path: list[str]) -> bool:
    """Whether a type of the config has the key ``path``; the keys of a dict are free."""
    if not path:
        return True
    for alternative in typing.get_args(kind) or [kind]:
        if isinstance(alternative, type) and issubclass(alternative, msgspec.Struct):
            fields = {field.name: field.type for field in msgspec.structs.fields(alternative)}
            if path[0] in fields and known_setting(fields[path[0]], path[1:]):
                return True
    return typing.get_origin(kind) is dict
