"""Whatever bytes a peer sends, decoding ends in a message or in WireError and in nothing else."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from coppice.wire import digest
from coppice.wire.arrays import decode_body, decode_header, encode
from coppice.wire.faults import WireError
from coppice.wire.messages import Result
from tests.services import EchoRequest

MALFORMED = [
    ["int64", [2**39, 2**39, 0], 0],  # more elements than numpy can index, no bytes
    ["int64", [1] * 100, 0],  # more dimensions than numpy has
    ["int64", [1], -1],
    ["int64", [2], 0],
    ["object", [1], 0],
    ["int32", [3], 0],  # the frame holds two
    ["int32", [2], 7],
    ["int32", [-2], 0],
    ["int32", [2]],
]


@pytest.mark.parametrize("bad", MALFORMED)
def test_a_malformed_array_header_is_a_wire_error(bad: Any) -> None:
    with pytest.raises(WireError):
        decode_body([b"", msgspec.msgpack.encode({"tokens": bad}), b"\0" * 8], EchoRequest)


def test_nesting_too_deep_for_the_decoder_is_a_wire_error() -> None:
    deep = b"\x91" * 100_000
    with pytest.raises(WireError):
        decode_header([deep])
    with pytest.raises(WireError):
        decode_body([b"", b"\x81\xa6tokens" + deep], EchoRequest)


def test_an_array_in_foreign_byte_order_is_not_sent_as_if_it_were_native() -> None:
    with pytest.raises(WireError, match="byte order"):
        encode(Result(1), EchoRequest(np.arange(3).astype(">i4")))


def test_a_safetensors_file_has_the_digest_of_its_tensors(tmp_path: Path) -> None:
    held = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(4, dtype=np.int32)}
    path = tmp_path / "model.safetensors"
    save_file(held, path, metadata={"format": "pt"})
    hashes = {name: digest.sha([array.tobytes()]) for name, array in held.items()}
    hashed = [("b", "F32", (2, 3), hashes["b"]), ("a", "I32", (4,), hashes["a"])]
    assert digest.safetensors_file(path) == digest.total(hashed)


def test_a_safetensors_file_that_was_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(100, dtype=np.float32)}, path)
    whole = path.read_bytes()
    for size in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            digest.safetensors_file(path)
