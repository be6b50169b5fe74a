"""The radix cache against a brute-force one, and its order of eviction."""

import numpy as np
import pytest
import torch

from coppice.actors.engines.radix import RadixCache, Segment
from coppice.common.radix import Edge, common_length

TOKEN_BYTES = 2 * 2 * 1 * 2 * 4 + 4


def kv(tokens: np.ndarray, start: int, end: int) -> torch.Tensor:
    """[2 layers, 2, 1 head, tokens, 2] whose every entry tells the prefix that ends there."""
    told = [float(hash(tuple(tokens[: i + 1].tolist())) % 9973) for i in range(start, end)]
    return torch.tensor(told).view(1, 1, 1, -1, 1).repeat(2, 2, 1, 1, 2)


def insert(cache: RadixCache, *tokens: int) -> int:
    made = np.array(tokens, np.int32)
    return cache.insert(made, lambda start, end: kv(made, start, end))


def segments(cache: RadixCache) -> dict[tuple[int, ...], Segment]:
    found: dict[tuple[int, ...], Segment] = {}

    def visit(node: Edge, prefix: tuple[int, ...]) -> None:
        for child in node.children.values():
            assert child.parent is node
            ends = (*prefix, *np.frombuffer(child.tokens, np.int32).tolist())
            found[ends] = child
            visit(child, ends)

    visit(cache._root, ())
    return found


class BruteForce:
    """Segments by the prefix each ends: its parent's end and when it was last used. Every step
    looks at all of them."""

    def __init__(self, budget: int):
        self.budget = budget
        self.now = 0
        self.ends: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}

    def match(self, tokens: tuple[int, ...]) -> int:
        self.now += 1
        longest = 0
        for end, (parent, _) in list(self.ends.items()):
            shared = common_length(*(np.array(one, np.int32).tobytes() for one in (end, tokens)))
            if shared > len(parent):
                self.ends[end] = (parent, self.now)
                longest = max(longest, shared)
        return longest

    def insert(self, tokens: tuple[int, ...]) -> None:
        before = dict(self.ends)
        kept = self.match(tokens)
        head = tokens[:kept]
        if kept == len(tokens):
            return
        if head and head not in self.ends:
            (cut,) = [
                e for e, (p, _) in self.ends.items() if len(p) < kept < len(e) and e[:kept] == head
            ]
            parent, used = before[cut]
            self.ends[head] = (parent, self.now)
            self.ends[cut] = (head, used)  # the rest, cut off, is not used now
        self.ends[tokens] = (head, self.now)
        while sum(len(e) - len(p) for e, (p, _) in self.ends.items()) * TOKEN_BYTES > self.budget:
            parents = {parent for parent, _ in self.ends.values()}
            leaves = [end for end in self.ends if end not in parents]
            del self.ends[min(leaves, key=lambda end: self.ends[end][1])]


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_equal_the_brute_force_cache_to_the_byte(seed: int) -> None:
    rng = np.random.default_rng(seed)
    budget = int(rng.integers(4, 60)) * TOKEN_BYTES
    cache, expected, new = RadixCache(budget), BruteForce(budget), list[int]()
    for _ in range(250):
        tokens = tuple(rng.integers(0, 3, rng.integers(1, 9)).tolist())
        if rng.random() < 0.4:
            found = cache.match(np.array(tokens, np.int32))
            assert found.length == expected.match(tokens)
            whole = torch.cat([*found.pieces, torch.zeros(2, 2, 1, 0, 2)], 3)
            assert torch.equal(whole, kv(np.array(tokens, np.int32), 0, found.length))
        else:
            new.append(insert(cache, *tokens))
            expected.insert(tokens)
        held = segments(cache)
        inserted = sum(new)
        assert inserted == cache.evicted_tokens + sum(len(s.tokens) // 4 for s in held.values())
        assert held.keys() == expected.ends.keys()
        assert cache.bytes == sum(s.size for s in held.values()) <= budget
        for segment in held.values():  # memory of its own: evicting it frees it
            assert segment.kv is not None
            assert segment.kv.untyped_storage().nbytes() == segment.kv.nbytes
