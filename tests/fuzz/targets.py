"""What is fuzzed: everything that reads bytes of a peer, text of a model or of a judge, a setting,
or the journal.

A target takes bytes. It returns on good and on refused input; any other exception is a finding.
``seeds`` gives good inputs, from which the mutations start, and what a search has found
interesting, both under ``corpus/TARGET``.
"""

import contextlib
import tomllib
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments import registry
from coppice.actors.environments.base import Task
from coppice.actors.environments.sotopia.environment import read_turn
from coppice.actors.environments.webshop.environment import read_reply
from coppice.actors.serving.conversations import chat_of, translated
from coppice.actors.serving.protocol import RequestRefused, body_of
from coppice.actors.serving.responses import ResponseStore
from coppice.actors.serving.sampling import completion_of, read
from coppice.common import options, support, vision
from coppice.common.http import JsonClient, retry_after
from coppice.judges import sotopia
from coppice.judges.exact_match import exact_match, extract_answer, f1
from coppice.judges.pprm import parse_final_score
from coppice.judges.slate import parse_score
from coppice.learner.main import pack_batch, unpack_batch
from coppice.learner.update.trainer import Batch
from coppice.scheduler.growth.tree import Node
from coppice.scheduler.ledger.node_codec import decode_node, encode_node
from coppice.tools.launching import config
from coppice.wire import arrays
from coppice.wire import messages as wire
from coppice.wire.faults import InfrastructureFault, WireError
from tests.fuzz.search import corpus

Target = Callable[[bytes], None]


def frames(data: bytes) -> list[bytes]:
    """Cut the bytes into frames, each after its length in two bytes."""
    cut = []
    while data:
        size = int.from_bytes(data[:2], "little")
        cut.append(data[2 : 2 + size])
        data = data[2 + size :]
    return cut


def framed(parts: list[Any]) -> bytes:
    """Join frames so that ``frames`` cuts them again."""
    return b"".join(len(bytes(part)).to_bytes(2, "little") + bytes(part) for part in parts)


def wire_header(data: bytes) -> None:
    with contextlib.suppress(WireError):
        arrays.decode_header(frames(data))


def wire_body(data: bytes) -> None:
    parts = frames(data)
    for kind in {kind for pair in wire.SERVICES.values() for kind in pair}:
        with contextlib.suppress(WireError):
            arrays.decode_body(parts, kind)


def wire_support(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        support.decode(data[1:], data[0] if data else 0)


def png_size(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        vision.size_of(data)


def journal_node(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_node(data)


def rank_batch(data: bytes) -> None:
    with contextlib.suppress(WireError, msgspec.DecodeError):
        unpack_batch(data)


def http_chat(data: bytes) -> None:
    with contextlib.suppress(RequestRefused):
        completion_of(body_of(data))
    for path in ("chat/completions", "responses", "messages"):
        with contextlib.suppress(RequestRefused):
            chat, _ = translated(f"/v1/{path}", body_of(data), ResponseStore())
            chat_of(chat)
            read(chat, ("tools", "tool_choice")).constraint()


def http_answer(data: bytes) -> None:
    client = JsonClient("http://127.0.0.1:1")
    with contextlib.suppress(InfrastructureFault):
        client._decoded("/x", data)
    retry_after(data.decode("latin-1"))


def judge_replies(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    score = parse_score(text)
    assert score in (None, -1.0, 0.0, 1.0)
    pair = parse_final_score(text)
    assert pair is None or 0 <= pair[0] <= pair[1]
    for side in (0, 1):
        assert set(sotopia.parse(text, side)) <= set(sotopia.DIMENSIONS)


def answers(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    extract_answer(text)
    assert 0.0 <= f1(text, [text, "x"]) <= 1.0
    assert exact_match(text, ["x"]) in (0.0, 1.0)


@cache
def environments() -> list[tuple[Any, Any]]:
    """Return every built-in environment that needs no files, with its first state."""
    pairs = []
    names = "search_qa tictactoe sudoku minesweeper sokoban webshop sotopia"
    for name in names.split():
        environment: Any = registry.load(name, {})
        made = registry.makes_tasks(environment)
        task = environment.task(3) if made else Task("t", question="q", golds=["a"])
        pairs.append((environment, environment.initial(task)))
    return pairs


def actions(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for environment, state in environments():
        action = environment.read(state, text)
        assert action.valid in (True, False)
    read_turn(text)
    for think in ("required", "optional"):
        read_reply(text, ["search", "buy now"], think)


def settings(data: bytes) -> None:
    """A whole config file, and the same text as one --set. A text with ":" may name a module of the
    user's, which would be imported."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        options.option(text)
    if ":" in text:
        return
    with contextlib.suppress(config.ConfigError):
        config.convert({}, [text])
    with contextlib.suppress(config.ConfigError, tomllib.TOMLDecodeError, RecursionError):
        config.convert(tomllib.loads(text), [])


TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (
        wire_header, wire_body, wire_support, png_size, journal_node, rank_batch, http_chat,
        http_answer, judge_replies, answers, actions, settings,
    )
}  # fmt: skip


def built(target: str) -> list[bytes]:
    """Good inputs of a binary form."""
    array = np.arange(6, dtype=np.int32)
    node = wire.TreeNode(0, -1, "prompt", array)
    bodies: list[msgspec.Struct] = [
        wire.GenerateRequest(array, 2, wire.Sampling(8, stop=["x"])),
        wire.GenerateResult([wire.Sample(array, array.astype(np.float32), array, "stop")], 7, 4),
        wire.JudgeResult([wire.Judgement({"reward": 0.5})]),
        wire.Trained(3, "RUN/weights/v000003", "d", {"loss": 0.1}),
        wire.TrainGroup(1, 2, [node], [wire.Turn(0, 0, 0, {"reward": 1.0})]),
    ]
    headers = (
        wire.Register("w", ["judge.x"], 1, 2, "h"),
        wire.Heartbeat(1, {"s": 1.0}),
        wire.Result(3),
    )
    journaled = (
        Node(0, -1, "prompt", array, "p", 0),
        Node(1, 0, "action", array, "a", 1, state={"b": [1]}),
    )
    made: dict[str, list[bytes]] = {
        "wire_header": [framed(arrays.encode(m)) for m in (*headers, wire.Request(1, "load", 2.0))],
        "wire_body": [framed(arrays.encode(wire.Result(1), body)) for body in bodies],
        "wire_support": [b"\x02" + support.encode([[3, 9], [200]])],
        "journal_node": [encode_node(one) for one in journaled],
        "rank_batch": [pack_batch(Batch(1, 1, [], [(0, node)]))],
    }
    return made.get(target, [])


def seeds(target: str) -> list[bytes]:
    """All inputs from which the mutations of a target start."""
    return built(target) + corpus(target)
