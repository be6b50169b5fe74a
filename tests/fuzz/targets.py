"""What is fuzzed: everything that reads bytes of a peer, text of a model or of a judge, a setting,
or the journal.

A target takes bytes. It returns on good and on refused input; any other exception is a finding.
``seeds`` gives good inputs, from which the mutations start; what a search has found interesting
lies under ``corpus/TARGET``.
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
from coppice.actors.serving import tools as dialects
from coppice.actors.serving.conversations import ResponseStore
from coppice.actors.serving.protocol import CompletionFields, RequestRefused, body_of
from coppice.actors.serving.protocol import read as read_body
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
from coppice.wire.faults import InfrastructureFault, WireError
from coppice.wire.messages import (  # fmt: skip
    SERVICES,
    GenerateRequest,
    GenerateResult,
    Heartbeat,
    Judgement,
    JudgeResult,
    Register,
    Request,
    Result,
    Sample,
    Sampling,
    Trained,
    TrainGroup,
    TreeNode,
    Turn,
)

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
    for kind in {kind for pair in SERVICES.values() for kind in pair}:
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
    with contextlib.suppress(WireError):
        unpack_batch(data)


def http_chat(data: bytes) -> None:
    readers: list[Callable[[dict[str, Any]], Any]] = [
        lambda body: read_body(body, CompletionFields),
        lambda body: dialects.chat(body, "m").sampled,
        lambda body: dialects.responses(body, "m", ResponseStore()).sampled,
        lambda body: dialects.messages(body, "m").sampled,
    ]
    for reader in readers:
        with contextlib.suppress(RequestRefused):
            reader(body_of(data)).sampling(64)


def http_answer(data: bytes) -> None:
    client = JsonClient("http://127.0.0.1:1")
    with contextlib.suppress(InfrastructureFault):
        client._decoded("/x", data)
    retry_after(data.decode("latin-1"), 0.0)


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
    for name in (
        "search_qa",
        "tictactoe",
        "sudoku",
        "minesweeper",
        "sokoban",
        "webshop",
        "sotopia",
    ):
        for own in ({}, {"reading": "released"}) if name == "sokoban" else ({},):
            environment = registry.load(name, dict(own))
            maker: Any = environment
            task = (
                maker.task(3)
                if registry.makes_tasks(environment)
                else Task("t", question="q", golds=["a"])
            )
            pairs.append((environment, environment.initial(task)))
    return pairs


def actions(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for environment, state in environments():
        action = environment.read(state, text)
        assert action.valid in (True, False)
    for side in (0, 1):
        read_turn(text, side)
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
        wire_header, wire_body, wire_support, png_size, journal_node, rank_batch, http_chat, http_answer, judge_replies, answers,
        actions, settings,
    )
}  # fmt: skip


def seeds(target: str) -> list[bytes]:
    """Good inputs of a target."""
    array = np.arange(6, dtype=np.int32)
    bodies: list[msgspec.Struct] = [
        GenerateRequest(array, 2, Sampling(8, stop=["x"])),
        GenerateResult([Sample(array, array.astype(np.float32), array, "stop")], 7, 4),
        JudgeResult([Judgement({"reward": 0.5})]),
        Trained(3, "RUN/weights/v000003", "d", {"loss": 0.1}),
        TrainGroup(1, 2, [TreeNode(0, -1, "prompt", array)], [Turn(0, 0, 0, {"reward": 1.0})]),
    ]
    good: dict[str, list[bytes]] = {
        "wire_header": [framed(arrays.encode(m)) for m in (Register("w", ["judge.x"], 1, 2, "h"), Heartbeat(1, {"s": 1.0}), Result(3), Request(1, "load", 2.0))],
        "wire_body": [framed(arrays.encode(Result(1), body)) for body in bodies],
        "wire_support": [b"\x02" + support.encode([[3, 9], [200]])],
        "png_size": [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x08\0\0\0\x04\x08\x02\0\0\0"],
        "journal_node": [encode_node(Node(0, -1, "prompt", array, "p", 0)), encode_node(Node(1, 0, "action", array, "a", 1, state={"b": [1]}))],
        "rank_batch": [pack_batch(Batch(1, 1, [], [(0, TreeNode(0, -1, "prompt", array))]))],
        "http_chat": [
            b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"stop":["a"],"logprobs":true,"top_logprobs":2}',
            b'{"prompt":["a","b"],"max_tokens":3,"n":2,"temperature":0.5,"logprobs":1,"stream":true}',
            b'{"messages":[],"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object"}}}}',
            b'{"input":[{"id":"msg_1"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}],"previous_response_id":"r","tools":[{"name":"f"}]}',
            b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"a":1}}]},{"role":"user","content":['
            b'{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"x"}],"is_error":true}]}],"tools":[{"name":"f","input_schema":{}}],'
            b'"system":[{"type":"text","text":"s"}],"tool_choice":{"type":"tool","name":"f"},"output_config":{"format":{"type":"json_schema","schema":{}}}}',
        ],
        "http_answer": [b'{"choices":[{"message":{"content":"x"}}]}', b"Wed, 21 Oct 2015 07:28:00 GMT", b"120"],
        "judge_replies": [
            b"<explanation>so</explanation>\n<score>+1</score>", b"<score>3/4</score>", b"Final Score: <score> 2/2 </score>",
            b'{"agent_1":{"believability":{"reasoning":"r","score":7}},"agent_2":{"goal":{"reasoning":"r","score":3}}}',
        ],
        "answers": [b"<answer> Paris </answer>", b"the \\boxed{4} of <answer></answer>"],
        "actions": [
            b"<think> a </think> <search> b </search>", b"<think>a</think><answer>b</answer>", b"<action> up </action>",
            b"<action>3 4</action>", b"<action>(1,2,3)</action>", b"<think>t</think><action>click[buy now]</action>",
            b'{"action_type":"speak","argument":"hello"}', b"<action>r1c2=3</action>", b"<action>search[red shoes]</action>",
        ],
        "settings": [b"learner.lr=1e-6", b"[learner]\nscheme = 'grpo'\n", b"scheduler.strategy_options={ k = 4 }", b"judges.outside=['x']"],
    }  # fmt: skip
    return good[target]
