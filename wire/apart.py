"""A function in a process of its own, whose memory (gigabytes that an allocator would keep) is free again when it returns."""

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Killed(Exception):
    """The process ended without an answer: the system killed it, most likely for memory."""


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` returns; it, its arguments and its result are pickled, between our own processes.

    Raises what it raises, and Killed. An interruption ends it too, after its own cleaning up.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_answer, args=(theirs, function, arguments)
    )  # no daemon: it may do a part of its work apart
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


def _answer(channel: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked passes an interruption on, once
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        answer = function(*arguments), None
    except Exception as error:  # noqa: BLE001 (raised again where it was asked for)
        answer = None, error
    except KeyboardInterrupt:
        sys.exit(130)  # who asked says so
    with contextlib.suppress(BrokenPipeError):  # who asked is gone
        channel.send(answer)
