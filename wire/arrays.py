"""Turn messages into ZeroMQ frames ``[header, body, array 0, array 1, ...]`` and back. Inside the
body, an array is represented by ``[dtype, shape, frame]``.

Received arrays are read-only. Everything is checked before it is decoded, and a violation raises
``WireError``.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from coppice.wire.faults import WireError
from coppice.wire.messages import Message

Frame = bytes | memoryview
Body = TypeVar("Body")

DTYPES = frozenset("bool int8 uint8 int16 int32 int64 float16 float32 float64".split())
"""Only plain buffers are allowed, because object arrays and structured arrays could smuggle code or
pointers."""
NAMES = {np.dtype(name): name for name in DTYPES}
"""By dtype, in native byte order. ``dtype.name`` is put together anew at each use."""
SMALL = 4096
"""Arrays of fewer bytes are copied, because a view keeps a larger buffer alive than the copy is."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of one message. An action of a group needs four frames."""

    max_frames: int = 2**18
    max_frame_bytes: int = 256 * 2**20
    max_total_bytes: int = 512 * 2**20


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Message)
# The decoder raises RecursionError when the nesting is too deep, and TypeError when a value cannot
# be a key of a map.
_MALFORMED = (msgspec.DecodeError, ValueError, RecursionError, TypeError)


def encode(header: Message, body: msgspec.Struct | None = None) -> list[Frame]:
    """Return the frames of one message. Arrays must have a dtype in DTYPES."""
    return [_header_encoder.encode(header), *([] if body is None else encode_body(body))]


def encode_body(body: msgspec.Struct) -> list[Frame]:
    """Return the frames after the header. They may be sent more than once as long as the arrays
    stay unchanged."""
    arrays: list[Frame] = []

    def place(value: Any) -> list[Any]:
        if not isinstance(value, np.ndarray):
            raise WireError(
                f"cannot send a {type(value).__name__}: expected a value or numpy array"
            )
        if (name := NAMES.get(value.dtype)) is None:
            raise WireError(
                f"cannot send an array of dtype {value.dtype!r}: expected one of {sorted(DTYPES)}"
                " in native byte order"
            )
        if value.nbytes < SMALL:
            arrays.append(value.tobytes())
        else:
            arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return [name, list(value.shape), len(arrays) - 1]

    return [msgspec.msgpack.encode(body, enc_hook=place), *arrays]


def check(frames: Sequence[Any], limits: Limits) -> None:
    """Raise WireError when a list of frames is empty or exceeds a limit."""
    if not frames or len(frames) > limits.max_frames:
        raise WireError(f"a message of {len(frames)} frames: expected 1 to {limits.max_frames}")
    sizes = [len(frame) for frame in frames]
    largest, size = max(sizes), sum(sizes)
    if largest > limits.max_frame_bytes or size > limits.max_total_bytes:
        raise WireError(f"a message of {size} bytes, largest frame {largest}: limits are {limits}")


def decode_header(frames: Sequence[Frame], limits: Limits = Limits()) -> Message:
    """Return the header of a message. Raises WireError when the message exceeds ``limits`` or its
    header is not one of Coppice."""
    check(frames, limits)
    try:
        return _header_decoder.decode(frames[0])
    except _MALFORMED as error:
        raise WireError(f"not a Coppice header: {error}") from None


def decode_body(frames: Sequence[Frame], kind: type[Body]) -> Body:
    """Return the body of a message as a ``kind``. Raises WireError when the body is absent,
    malformed or of another type."""
    if len(frames) < 2:
        raise WireError(f"a message without body: expected {kind.__name__}")
    try:
        if len(frames) == 2:
            return _plain_decoder(kind).decode(frames[1])
        return msgspec.msgpack.decode(frames[1], type=kind, dec_hook=partial(_array, frames))
    except _MALFORMED as error:
        raise WireError(f"a body that is not a {kind.__name__}: {error}") from None


@cache
def _plain_decoder(kind: type[Body]) -> msgspec.msgpack.Decoder[Body]:
    """A decoder for bodies without array frames, kept because most messages have none and building
    a decoder costs more than using it."""
    return msgspec.msgpack.Decoder(kind, dec_hook=partial(_array, (b"", b"")))


def _array(frames: Sequence[Frame], _: type, value: Any) -> np.ndarray:
    match value:
        case [str(dtype), [*shape], int(index)] if dtype in DTYPES and all(
            isinstance(n, int) and 0 <= n < 2**40 for n in shape
        ):
            pass
        case _:
            raise WireError(f"array header {value!r}: expected [dtype, shape, frame]")
    if not 0 <= index < len(frames) - 2:
        raise WireError(f"array frame {index}: the message has {len(frames) - 2} array frames")
    buffer = frames[index + 2]
    if math.prod(shape) * np.dtype(dtype).itemsize != len(buffer):
        raise WireError(f"array {dtype}{shape}: its frame has {len(buffer)} bytes")
    own = bytes(buffer) if len(buffer) < SMALL else buffer
    array = np.frombuffer(own, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array
