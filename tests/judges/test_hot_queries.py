"""Equal queries in flight are searched once, queries that wait are joined, and a fleet of servers
answers while one of them does."""

import asyncio
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.hot import HotQueries
from coppice.judges.retriever.http_client import RetrieverFleet
from coppice.judges.retriever.worker import opened
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Passage
from tests.judges.test_llm import serving
from tests.judges.test_retriever import Shelf, application, post


class Gate(Shelf):
    """A shelf whose searches wait; ``broken`` ones fail then."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[asyncio.Future[None]] = []
        self.open = self.most = 0

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        passages = await super().search(queries, topk)
        self.gates.append(asyncio.get_running_loop().create_future())
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.gates[-1]
        finally:
            self.open -= 1
        return passages


async def settled() -> None:
    """Until every task has gone as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_equal_queries_in_flight_are_searched_once_and_waiting_ones_are_joined() -> None:
    gate = Gate()
    hot = HotQueries(gate, 8, batch=3)
    calls = [asyncio.create_task(hot.search([query], 1)) for query in "aabcadeb"]
    await settled()
    assert gate.asked == [["a"]]
    gate.gates[0].set_result(None)
    await settled()
    assert gate.asked == [["a"], ["b", "c", "d"]], "at most three are joined"
    gate.gates[1].set_result(None)
    await settled()
    gate.gates[2].set_result(None)
    found = [(await call)[0][0].title for call in calls]
    assert found == [f"title of {query}" for query in "aabcadeb"]
    assert gate.asked == [["a"], ["b", "c", "d"], ["e"]]
    await hot.search(["a"], 1)
    assert hot.searched == 5
    assert gate.asked == [["a"], ["b", "c", "d"], ["e"]], "a kept query is not searched again"


async def test_a_caller_that_leaves_takes_nothing_from_the_others_nor_from_the_cache() -> None:
    gate = Gate()
    hot = HotQueries(gate, 8)
    leaving, staying = (asyncio.create_task(hot.search(["a"], 1)) for _ in range(2))
    alone = asyncio.create_task(hot.search(["b"], 1))
    await settled()
    leaving.cancel()
    alone.cancel()
    gate.gates[0].set_result(None)
    await settled()
    gate.gates[1].set_result(None)
    assert (await staying)[0][0].title == "title of a"
    await settled()
    assert list(hot.kept) == [("a", 1), ("b", 1)]


async def test_a_failed_search_is_every_callers_fault_and_kept_by_nobody() -> None:
    gate = Gate()
    hot = HotQueries(gate, 8)
    calls = [asyncio.create_task(hot.search(["a"], 1)) for _ in range(3)]
    await settled()
    gate.gates[0].set_exception(InfrastructureFault("the disk is gone"))
    for call in calls:
        with pytest.raises(InfrastructureFault, match="disk"):
            await call
    again = asyncio.create_task(hot.search(["a"], 1))
    await settled()
    gate.gates[1].set_result(None)
    assert len((await again)[0]) == 1
    assert gate.asked == [["a"], ["a"]]


QUERIES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4)
FEW = st.integers(1, 3)
CALLS = st.lists(st.tuples(QUERIES, st.integers(1, 2)), max_size=30)


@settings(max_examples=30, deadline=None)
@given(CALLS, st.integers(0, 6), FEW, FEW, st.randoms(use_true_random=False))
def test_whatever_is_asked_together_each_gets_its_own_and_nothing_twice_at_once(
    calls: list[tuple[list[str], int]], size: int, batch: int, at_once: int, order: object
) -> None:
    async def ask() -> None:
        gate = Gate()
        hot = HotQueries(gate, size, batch, at_once)
        tasks = [asyncio.create_task(hot.search(queries, topk)) for queries, topk in calls]
        while not all(task.done() for task in tasks):
            await settled()
            if waiting := [future for future in gate.gates if not future.done()]:
                order.choice(waiting).set_result(None)  # pyright: ignore
        for (queries, topk), task in zip(calls, tasks, strict=True):
            assert task.result() == await Shelf().search(queries, topk)
        assert gate.most <= at_once
        assert len(hot.kept) <= size
        assert all(len(asked) == len(set(asked)) <= batch for asked in gate.asked)
        assert hot.searched == sum(map(len, gate.asked))

    asyncio.run(ask())


class Server(Shelf):
    """A server of a fleet: it answers, or fails while ``down``."""

    down = False

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        found = await super().search(queries, topk)
        await asyncio.sleep(0)
        if self.down:
            raise InfrastructureFault("connection refused")
        return found


async def test_a_fleet_spreads_searches_and_goes_on_without_a_server_until_it_is_back() -> None:
    servers, now = [Server(), Server(), Server()], [0.0]
    fleet = RetrieverFleet(servers, lambda: now[0])
    await asyncio.gather(*(fleet.search([str(i)], 1) for i in range(9)))
    assert [len(server.asked) for server in servers] == [3, 3, 3]
    servers[0].down = True
    for i in range(4):
        assert await fleet.search([str(i)], 1) == await Shelf().search([str(i)], 1)
    assert len(servers[0].asked) == 4, "after it failed once it is left alone"
    now[0], servers[0].down = 31.0, False
    await fleet.search(["x"], 1)
    assert servers[0].asked[-1] == ["x"]
    for server in servers:
        server.down = True
    with pytest.raises(InfrastructureFault, match="refused"):
        await fleet.search(["y"], 1)
    assert [server.asked[-1] for server in servers] == [["y"]] * 3


@pytest.mark.second
async def test_a_run_searches_in_a_fleet_by_its_urls_and_one_server_may_be_away() -> None:
    shelves = Shelf(), Shelf()
    async with serving(application(shelves[0])) as away:
        pass
    async with (
        serving(application(shelves[1])) as url,
        opened(RetrieverConfig(f"{away}, {url}", cache=4)) as queries,
    ):
        found = await asyncio.wait_for(queries.search(["x", "y"], 2), 30)
        assert found == await Shelf().search(["x", "y"], 2)
        assert await queries.search(["y"], 2) == found[1:]
    assert (shelves[0].asked, shelves[1].asked) == ([], [["x", "y"]])
    with pytest.raises(ValueError, match="a server has its own"):
        async with opened(RetrieverConfig("http://a", search="nprobe=4")):
            pass


@pytest.mark.slow
async def test_a_server_in_front_of_others_keeps_their_answers() -> None:
    shelf = Shelf()
    async with serving(application(shelf)) as url:
        module = ("-m", "coppice.judges.retriever.http_server", "--index", url, "--port", "0")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-u", *module, stdout=pipe)
        assert process.stdout is not None
        said = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        front = said.split()[3].strip()
        for _ in range(3):
            _, answer = await post(front, b'{"queries": ["x"], "topk": 1}')
            assert answer["result"][0][0]["contents"] == '"title of x"\ntext 0'
        process.terminate()
        await process.wait()
    assert shelf.asked == [["x"]]
