"""A node as the journal keeps it. Of the state after a node only its difference from the state
before is stored, because a state tends to hold the whole episode."""

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from coppice.scheduler.growth.tree import Node, Tree
from coppice.wire.arrays import DTYPES, NAMES

DIFFERENCE = 1
"""The msgpack extension of a state that is stored as its difference from another one."""
MOST = 2**23
"""The most bytes of a node besides its arrays: its text, notes, scores and state."""

KEYS = (
    b"anchor\xc0answer\xa5thinkquery\xa6reward\xa9advantage\xa5valid\xcb\x3f\xf0truncated"
    b"\xa7outcome\xa2f1turn\xa4nodescores\xa5notesstate\xc7trajectory\x01finish\xa4stopchosen"
    b"\xc3sampled\x92\xa4bool\xc4\x08\x01\x01versions\x92\xa5int32\xc4\x20logprobs"
    b"\x92\xa7float32\xc4\x20step\x01text\xa6tokens\x92\xa5int32\xc4kind\xabobservation"
    b"\xa6prompt\xa6action\xa6parent\x01\x88\xa2id\x01"
)
"""What bodies have in common, the commonest last. Bodies are read with what they were written with:
a change needs another ``journal.FORMAT``."""


def deflated(body: bytes) -> bytes:
    """Compress a body of the journal, in about 30 microseconds."""
    packer = zlib.compressobj(1, zlib.DEFLATED, -12, 5, zdict=KEYS)
    return packer.compress(body) + packer.flush()


def inflated(blob: bytes) -> bytes:
    """Return the body that ``deflated`` compressed."""
    return zlib.decompressobj(-zlib.MAX_WBITS, zdict=KEYS).decompress(blob)


def encode_node(node: Node, tree: Tree | None = None) -> bytes:
    """Encode a node as msgpack, with arrays inline as [dtype, bytes]. The state is shortened if the
    ``tree`` is given to which the node belongs. Raises ValueError for texts of more than ``MOST``.
    """
    state = node.state
    before = None if tree is None or state is None else tree.state_before(node)
    if isinstance(state, dict) and isinstance(before, dict) and state.keys() == before.keys():
        difference = msgspec.msgpack.encode(_difference(state, before))
        node = msgspec.structs.replace(node, state=Ext(DIFFERENCE, difference))
    body = msgspec.msgpack.encode(node, enc_hook=_plain)
    if len(body) > MOST:
        arrays = [value for value in msgspec.structs.astuple(node) if isinstance(value, np.ndarray)]
        if (size := len(body) - sum(array.nbytes for array in arrays)) > MOST:
            raise ValueError(f"a node of {size} bytes of text and state, expected at most {MOST}")
    return body


def decode_node(blob: bytes) -> Node:
    """Decode what ``encode_node`` returned. Raises ValueError when the blob is damaged."""
    try:
        return msgspec.msgpack.decode(blob, type=Node, dec_hook=_array)
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"a node of the journal is damaged ({error}): restore journal.sqlite from a copy"
        ) from None


def restore(tree: Tree, blobs: Iterable[bytes]) -> None:
    """Add encoded nodes to a tree, with whole states. A state is None if the journal has lost the
    one before it (``coppice watch --audit`` tells)."""
    for node in map(decode_node, blobs):
        tree.put(node)
        if isinstance(node.state, Ext):
            node.state = _whole(node.state, tree.state_before(node))


def _difference(state: dict[str, Any], before: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The items that sequences have beyond those before, and the other values that differ."""
    longer, other = {}, {}
    for key, value in state.items():
        old = before[key]
        both = isinstance(value, list | tuple) and isinstance(old, list | tuple)
        if both and [*value[: len(old)]] == [*old]:
            longer[key] = value[len(old) :]
        elif type(value) is not type(old) or value != old:
            other[key] = value
    return {key: items for key, items in longer.items() if items}, other


def _whole(stored: Ext, before: Any) -> Any:
    if before is None:
        return None
    try:
        longer, other = msgspec.msgpack.decode(stored.data)
        return before | other | {key: before[key] + items for key, items in longer.items()}
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a state of the journal is damaged ({error}): restore journal.sqlite from a copy"
        ) from None


def _plain(array: np.ndarray) -> list[Any]:
    return [NAMES[array.dtype], array.tobytes()]


def _array(_: type, value: Any) -> np.ndarray:
    name, raw = value
    if name not in DTYPES:  # numpy would parse any other text as a description of a type
        raise ValueError(f"dtype {name!r}, expected one of {sorted(DTYPES)}")
    return np.frombuffer(raw, dtype=name)
