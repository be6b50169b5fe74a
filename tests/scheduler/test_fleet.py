"""Placement and order of generate calls: pure decisions about loads, prefixes and time that the
tests give."""

import random

import numpy as np

from coppice.scheduler.dispatch.calls import Place, Worker
from coppice.scheduler.dispatch.placement import CAPACITY, PATIENCE_S, SPARE, Fleet, Generation
from coppice.wire.messages import GenerateRequest, GenerateResult, Sample, Sampling
from tests.services import loaded

HEAD = list(range(100, 120))


class World:
    """Actors with a clock, and the calls that run on them."""

    def __init__(self, capacity: float | None = None, workers: str = "ab", batch: int = 4):
        self.now = 0.0
        self.fleet = Fleet(steps=2, batch=batch, clock=lambda: self.now)
        self.stats = {} if capacity is None else {CAPACITY: float(capacity)}
        self.running: dict[str, list[Place]] = {name: [] for name in workers}

    def workers(self) -> list[Worker]:
        running = self.running.items()
        return [loaded(name, len(calls), 8, self.stats) for name, calls in running]

    def call(self, tree: int, prompt: list[int], background: bool = False) -> Place:
        request = GenerateRequest(np.array(prompt, np.int32), 1, Sampling(10))
        return Generation(self.fleet, tree, request, background)

    def start(self, place: Place) -> str | None:
        worker = place.choose(self.workers(), frozenset())
        if worker is None:
            return None
        place.started(worker.name)
        self.running[worker.name].append(place)
        return worker.name

    def end(self, place: Place, samples: list[list[int]] | None = None) -> None:
        worker = next(name for name, calls in self.running.items() if place in calls)
        self.running[worker].remove(place)
        rest = np.zeros(1, np.float32), np.zeros(1, np.int32), "stop"
        made = [Sample(np.array(each, np.int32), *rest) for each in samples or []]
        place.ended(worker, GenerateResult(made, 1, 0) if samples is not None else None)


def own(tree: int, count: int) -> list[int]:
    """A tree's tokens, shared with no other."""
    return [1000 * (tree + 1) + i for i in range(count)]


def test_new_trees_spread_over_the_actors_though_one_holds_their_common_head() -> None:
    world = World()
    started = [world.start(world.call(tree, HEAD + own(tree, 5))) for tree in range(4)]
    assert started == ["a", "b", "a", "b"]


def test_a_spare_actor_gets_trees_for_which_the_others_have_no_room() -> None:
    world = World(capacity=180, workers="ab")
    usual = world.workers()
    usual[1].stats = {**usual[1].stats, SPARE: 1.0}
    chosen = []
    for tree in range(3):
        place = world.call(tree, own(tree, 30))
        worker = place.choose(usual, frozenset())
        assert worker is not None
        place.started(worker.name)
        chosen.append(worker.name)
    assert chosen == ["a", "a", "b"]  # each may need 80 tokens


def test_a_tree_goes_on_where_its_prefix_is_until_that_actor_is_overloaded() -> None:
    world = World()
    first = world.call(0, HEAD + own(0, 5))
    assert world.start(first) == "a"
    world.end(first, [[7, 8]])
    places = [world.call(0, HEAD + own(0, 5) + [7, 8, tree]) for tree in range(7)]
    assert [world.start(place) for place in places] == ["a"] * 5 + ["b"] * 2


def test_trees_wait_while_older_ones_take_the_cache_and_the_oldest_never_does() -> None:
    world = World(capacity=100, workers="a", batch=1)
    places = [world.call(tree, own(tree, 30)) for tree in range(3)]
    assert world.start(places[0]) == "a"
    assert world.start(places[1]) is None  # each may need two steps' worth, 80 tokens
    world.end(places[0], [[1] * 4])
    small = world.call(0, own(0, 30) + [1] * 4 + own(9, 80))
    assert world.start(small) == "a"  # more than the cache holds, but the oldest


def test_what_ended_trees_needed_is_the_measure_for_the_next() -> None:
    world = World(capacity=100, workers="a", batch=1)
    first = world.call(0, own(0, 30))
    assert world.start(first) == "a"
    assert world.start(world.call(1, own(1, 30))) is None
    world.end(first, [[1] * 4])
    world.fleet.ended(0)
    assert [world.start(world.call(tree, own(tree, 25))) for tree in (1, 2, 3)] == ["a", "a", None]


def test_a_tree_leaves_the_holder_of_its_prefix_only_for_an_idle_actor() -> None:
    world = World(capacity=125, workers="ab", batch=1)
    old, other = world.call(0, own(0, 30)), world.call(3, own(3, 30))
    young = world.call(2, own(2, 10))
    assert [world.start(place) for place in (old, other, young)] == ["a", "b", "a"]
    world.end(young, [[1] * 9])
    again = world.call(2, own(2, 10) + [1] * 9 + own(9, 30))
    assert world.start(again) is None  # b has room, but not the prefix
    world.end(other)
    assert world.start(again) is None
    world.now += PATIENCE_S
    assert world.start(again) == "b"


def test_an_actor_that_decodes_less_than_a_batch_takes_what_has_no_cache_room() -> None:
    world = World(capacity=50, workers="a", batch=2)
    places = [world.call(tree, own(tree, 30)) for tree in range(4)]
    assert world.start(places[0]) == "a"
    assert world.start(places[1]) is None
    world.now += PATIENCE_S
    assert world.start(places[1]) == "a"
    world.now += 10 * PATIENCE_S
    assert world.start(places[2]) is None  # two samples are a batch
    world.end(places[1], [[1]])
    assert world.start(places[2]) is None  # the tree may come back at once
    world.now += PATIENCE_S
    assert world.start(places[2]) == "a"


def test_the_order_is_trained_turns_begun_trees_age_depth_and_siblings() -> None:
    world = World()
    for tree in (3, 5):
        world.start(world.call(tree, own(tree, 3)))
    wanted = [
        world.call(3, own(3, 9)),
        *(world.call(3, [*own(3, 3), 1, last]) for last in (1, 1, 2)),
        world.call(5, own(5, 9)),
        world.call(1, own(1, 9)),  # not begun
        world.call(4, own(4, 3)),
        world.call(3, own(3, 9), background=True),
        world.call(5, own(5, 3), background=True),
    ]
    shuffled = random.Random(0).sample(wanted, len(wanted))
    ranks = [place.rank() for place in wanted]
    assert sorted(place.rank() for place in shuffled) == ranks


def test_an_actor_without_room_for_a_token_now_gets_trees_like_one_that_tells_no_capacity() -> None:
    world = World(capacity=0)
    assert [world.start(world.call(tree, own(tree, 25))) for tree in range(4)] == [*"abab"]
