"""The arena of which keys and values are lent parts."""

import mmap
import random

import pytest
import torch

from coppice.actors.engines import arena as arenas
from coppice.actors.engines.arena import LINE, Arena

TOKEN = torch.zeros(3, dtype=torch.bfloat16)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every piece that came from the system."""
    sizes, real = list[int](), arenas._pages
    monkeypatch.setattr(arenas, "_pages", lambda size: (sizes.append(size), real(size))[1])
    return sizes


@pytest.mark.parametrize("seed", range(5))
def test_parts_do_not_overlap_and_come_back(seed: int, asked: list[int]) -> None:
    odds, held, arena = random.Random(seed), dict[int, torch.Tensor](), Arena(TOKEN, 64 * LINE)
    for number in range(250):
        held[number] = arena.empty(odds.randint(1, 9), odds.randint(1, 40)).fill_(number)
        assert held[number].data_ptr() % LINE == 0
        assert all(bool((part == value).all()) for value, part in held.items())
        for value in odds.sample(sorted(held), odds.randint(0, 20) if len(held) > 20 else 0):
            del held[value]
    assert 1 < len(asked) < 125  # more than the arena was held at times, but not mostly
    held.clear()
    del asked[:]
    whole = arena.empty(32 * LINE)
    assert not asked and whole.dtype == TOKEN.dtype
    arena.empty(1)
    assert asked == [2]  # nothing is left, and a part that is dropped costs the arena nothing


def test_a_view_keeps_its_part_and_a_copy_has_its_own(asked: list[int]) -> None:
    arena = Arena(TOKEN, 4 * LINE)
    first = arena.empty(2, LINE).zero_()
    view = first[1:, 1:3]
    del first
    copy = arena.copied(view)
    assert asked == [4 * LINE, 4]  # the view holds all four lines
    view += 1
    assert copy.tolist() == [[0, 0]] and view.tolist() == [[1, 1]]
    del view
    assert arena.copied(copy).tolist() == [[0, 0]] and len(asked) == 2


def test_free_pages_go_back_to_the_system_when_a_part_does_not_fit(asked: list[int]) -> None:
    half = mmap.PAGESIZE // 2  # numbers of a page, of two bytes each
    arena = Arena(TOKEN, 8 * mmap.PAGESIZE)
    parts = [arena.empty(count).fill_(1) for count in (half + 32, 3 * half, half + 32, 2 * half)]
    del parts[1], parts[-1]
    large = arena.empty(9 * half).fill_(1)
    assert asked == [8 * mmap.PAGESIZE, 9 * mmap.PAGESIZE]
    assert all(bool((part == 1).all()) for part in (*parts, large))
    again = arena.empty(3 * half)
    assert again.sum() == half  # what shares a page with a part in use is kept


def test_other_devices_have_their_own_memory(asked: list[int]) -> None:
    arena = Arena(TOKEN.to("meta"), LINE)
    assert arena.empty(2, 3).device.type == "meta" and asked == [LINE]
