"""Frames, keys and peers."""

import asyncio
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coppice.wire import digest
from coppice.wire.arrays import DTYPES, SMALL, Limits, decode_body, decode_header, encode
from coppice.wire.faults import WireError
from coppice.wire.keys import ROLES, RunKeys
from coppice.wire.messages import JudgeRequest, Register, Request, Result, TrainGroup
from coppice.wire.sockets import Router
from tests.services import Bench, EchoRequest, ask, bench, echo
from tests.updates import groups

ARRAYS = hnp.arrays(
    st.sampled_from(sorted(DTYPES)).map(np.dtype),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


@given(ARRAYS)
def test_arrays_survive_the_wire_with_dtype_and_shape(array: np.ndarray) -> None:
    frames = [memoryview(bytes(frame)) for frame in encode(Result(1), EchoRequest(array))]
    back = decode_body(frames, EchoRequest).tokens
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("length", [10, SMALL // 4])
def test_large_arrays_are_not_copied_and_small_ones_keep_no_message_alive(length: int) -> None:
    array = np.arange(length, dtype=np.int32)
    frames = encode(Result(1), EchoRequest(array))
    assert np.shares_memory(np.frombuffer(frames[2], np.int32), array) == (array.nbytes >= SMALL)
    back = decode_body([memoryview(frame) for frame in frames], EchoRequest).tokens
    assert np.shares_memory(back, np.frombuffer(frames[2], np.int32)) == (array.nbytes >= SMALL)
    assert not back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_limits_hold_before_anything_is_decoded() -> None:
    with pytest.raises(WireError, match="frames"):
        decode_header([b"x"] * 5, Limits(max_frames=4))
    with pytest.raises(WireError, match="bytes"):
        decode_header([b"x" * 11], Limits(max_frame_bytes=10))


def test_a_group_of_many_turns_is_one_message() -> None:
    (some,), _ = groups(0, trees=1, k=10_000)
    frames = encode(Request(1, "train", 1.0), some)
    assert len(frames) > 40_000 and decode_header(frames) == Request(1, "train", 1.0)
    assert len(decode_body(frames, TrainGroup).nodes) == 10_001


def test_a_body_of_another_type_is_refused_and_unknown_headers_too() -> None:
    with pytest.raises(WireError, match="JudgeRequest"):
        decode_body(encode(Result(1), EchoRequest(np.zeros(1, np.int32))), JudgeRequest)
    with pytest.raises(WireError, match="header"):
        decode_header([msgspec.msgpack.encode({"type": "exec", "code": "1"})])


def test_keys_are_private_files_and_a_resumed_run_keeps_them(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    RunKeys.create(folder)
    first = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path.stem for path in (folder / "peers").iterdir()} == set(ROLES)
    RunKeys.create(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == first
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in first} == {0o600}
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in (folder, folder / "peers")} == {0o700}


async def test_a_non_loopback_bind_without_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="CURVE"):
        Router("tcp://0.0.0.0:0", None)


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    first = Router("tcp://127.0.0.1:0", None)
    with pytest.raises(OSError, match=first.endpoint.rsplit(":", 1)[1]):
        Router(first.endpoint, None)
    first.close()


@contextmanager
def raw(b: Bench, *pair: bytes) -> Iterator[zmq.asyncio.Socket]:
    """A socket of a peer that speaks no protocol. pair: its keys; none for no encryption."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if pair:
            socket.curve_serverkey = b.keys.server_public.encode()
            socket.curve_publickey, socket.curve_secretkey = pair
        socket.connect(b.dispatcher.endpoint)
        yield socket


@pytest.mark.parametrize("knows", [False, True], ids=["no keys", "the server's public key alone"])
async def test_a_stranger_without_the_runs_keys_never_reaches_the_decoder(
    tmp_path: Path, knows: bool
) -> None:
    async with bench(tmp_path) as b:
        with raw(b, *(zmq.curve_keypair() if knows else ())) as stranger:
            await stranger.send_multipart(encode(Register("spy", ["echo"], 1, 1, "h")))
            await b.work("honest", {"echo": echo})
            await b.dispatcher.call("echo", ask(), deadline=5)
            assert [w.name for w in b.dispatcher.workers()] == ["honest"]


async def test_garbage_from_a_peer_with_keys_drops_that_peer_alone(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("honest", {"echo": echo})
        rng = np.random.default_rng(0)
        garbage = [[rng.bytes(n)] for n in (0, 1, 50, 5000)] + [[b"\x81\xa4type"] * 50]
        odd = [bytes(frame) for frame in encode(Request(1, "echo", 1.0))]  # a scheduler's word
        with raw(b, b.keys.public.encode(), b.keys.secret.encode()) as peer:
            await peer.send_multipart(encode(Register("noisy", ["echo"], 1, 1, "h")))
            for frames in (odd, *garbage):
                await peer.send_multipart(frames)
            async with asyncio.timeout(10):
                while b.dispatcher.counters["malformed_peers"] <= len(garbage):
                    await b.dispatcher.call("echo", ask(), deadline=5)
            assert [w.name for w in b.dispatcher.workers()] == ["honest"]


def test_a_digest_depends_on_names_types_shapes_and_bytes_not_on_order() -> None:
    a, b = ("a", "F32", (2,), "12345678"), ("b", "F32", (2,), "abcdefgh")
    assert digest.total([a, b]) == digest.total([b, a])
    for at, other in enumerate(("c", "I32", (1, 2), "12345679")):
        changed: Any = (*a[:at], other, *a[at + 1 :])
        assert digest.total([changed]) != digest.total([a])
