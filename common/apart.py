"""Run a function in a process of its own, so that its memory (gigabytes that an allocator would
keep) is freed when the function returns."""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from coppice.common.process import die_with


class Killed(Exception):
    """The process ended without an answer. Most likely the system killed it because memory ran out."""


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``function`` returns. The function, its arguments and its result are pickled, but
    only between our own processes.

    Raises what the function raises, and Killed. An interruption also ends the other process, after
    that process has cleaned up.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    # The process is not a daemon, because the function may itself call ``apart``.
    process = context.Process(target=_answer, args=(os.getpid(), theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        result, error = ours.recv()
    except EOFError:
        raise Killed from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
        ours.close()
    if error is not None:
        raise error
    return result


def _answer(
    parent: int, channel: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller passes an interruption on, once
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        answer = function(*arguments), None
    except Exception as error:  # noqa: BLE001
        answer = None, error
    except KeyboardInterrupt:
        sys.exit(130)  # the caller reports the interruption
    with contextlib.suppress(BrokenPipeError):  # the caller has gone
        channel.send(answer)
