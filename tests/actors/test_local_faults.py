"""Faults inside the embedded engine's thread: every request is answered or failed, a failed step
leaves nothing held, a death is told."""

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice.actors import worker
from coppice.actors.config import ActorProcess, ActorsConfig
from coppice.actors.engines import local as local_engine
from coppice.actors.engines.arena import Arena
from coppice.actors.engines.batch import RadixBatch
from coppice.actors.engines.local import LocalEngine
from coppice.actors.engines.memory import KVMemory, Shelf
from coppice.actors.engines.radix import RadixCache
from coppice.actors.engines.thread import FAILED_STEPS
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, Sampling
from tests.actors.conftest import Local
from tests.actors.test_local_engine import TOLERANCE, held_rows, ids, noised, reference, worst
from tests.actors.test_openai_server import serving
from tests.services import bench

ENOUGH_S = 20
DIES = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


HEAD = ids(60, 20)
SIBLINGS = [GenerateRequest(np.concatenate([HEAD, ids(61, 3)]), 2, Sampling(6)) for _ in range(2)]
"""The second waits for the prefix of the first."""
LONG = GenerateRequest(ids(1, 10), 24, Sampling(200))


@pytest.fixture
async def engine(local: Local) -> LocalEngine:
    return await local()


def failing(
    real: Callable[..., Any], error: Exception, fails: Iterator[bool]
) -> Callable[..., Any]:
    """``real``, whose calls raise as ``fails`` says, and work after its end."""

    def either(*arguments: Any, **named: Any) -> Any:
        if next(fails, False):
            raise error
        return real(*arguments, **named)

    return either


def once(call: int = 1) -> Iterator[bool]:
    return iter([False] * (call - 1) + [True])


async def together(
    engine: LocalEngine, requests: list[GenerateRequest]
) -> list[GenerateResult | BaseException]:
    """Results and errors of requests that one step sees for the first time."""
    go = threading.Event()

    def wait() -> None:
        go.wait(ENOUGH_S)

    engine._thread.tell(wait)
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)  # each has reached the engine
    go.set()
    async with asyncio.timeout(ENOUGH_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


def failures(results: list[Any]) -> list[str]:
    assert {type(result) for result in results} == {InfrastructureFault}
    return [str(result) for result in results]


async def check_all_is_free_and_right(engine: LocalEngine, folder: Path) -> None:
    """Nothing is held, and requests that need every place are answered as by a full forward."""
    memory, places = engine.batch.memory, engine.config.max_batch
    assert (memory.running_bytes, memory.cache.bytes, engine.stats()["running"]) == (0, 0, 0)
    assert engine.batch.admission.places == places and not engine.batch.admission
    prompts = [np.concatenate([ids(70, 20), ids(71 + i, 4)]) for i in range(3)]
    done: Any = await together(engine, [GenerateRequest(p, places, Sampling(4)) for p in prompts])
    assert worst(reference(folder), *zip(prompts, done, strict=True)) < TOLERANCE
    assert held_rows(engine) == 0


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Shelf, "resize", 1),  # the first starts
        (KVMemory, "reserve", 2),  # the third starts, while the second waits for the first's prefix
        (RadixBatch, "forward", 3),  # samples decode
        (KVMemory, "keep", 1),  # a prompt is whole
        (LocalEngine, "_leave", 2),  # a sample is done
    ],
)
async def test_a_step_that_fails_anywhere_fails_every_open_request_and_the_engine_goes_on(
    llama: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:  # fmt: skip
    error = ValueError("no memory") if call == 2 else RuntimeError("no memory")
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), error, once(call)))
    results = await together(engine, [*SIBLINGS, GenerateRequest(ids(63, 30), 3, Sampling(6))])
    assert failures(results) == ["engine step failed: no memory"] * 3
    await check_all_is_free_and_right(engine, llama)


async def test_an_abort_that_fails_fails_the_others_and_the_engine_goes_on(
    llama: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [asyncio.create_task(engine.generate(LONG)) for _ in range(2)]
    while not engine.counts["decoded_tokens"]:
        await asyncio.sleep(0)
    monkeypatch.setattr(Shelf, "drop", failing(Shelf.drop, RuntimeError("no memory"), once()))
    tasks[0].cancel()
    async with asyncio.timeout(ENOUGH_S):
        with pytest.raises(InfrastructureFault, match="no memory"):
            await tasks[1]
    await check_all_is_free_and_right(engine, llama)


@pytest.mark.second
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_fails_and_wherever_every_request_is_answered_rightly_or_failed(
    local: Local, llama: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    engine = await local(prefill_tokens=32, kv_cache_gib=300_000 / 2**30)
    odds, sizes = random.Random(seed), np.random.default_rng(seed)
    error, sometimes = RuntimeError("no memory"), iter(lambda: odds.random() < 0.01, None)
    places = [
        (Shelf, "resize"), (Shelf, "put"), (Shelf, "drop"), (KVMemory, "reserve"), (KVMemory, "keep"),
        (Arena, "empty"), (RadixCache, "match"), (RadixBatch, "forward"), (local_engine, "pick"),
    ]  # fmt: skip
    drawn = sizes.integers(1, [20, 60, 6, 12], (60, 4)).tolist()
    prompts = [np.concatenate([HEAD[:a], ids(i, b)]) for i, (a, b, *_) in enumerate(drawn)]
    numbers = zip(prompts, drawn, strict=True)
    asks = [GenerateRequest(p, n, Sampling(most)) for p, (*_, n, most) in numbers]
    with monkeypatch.context() as patched:
        for owner, name in places:
            patched.setattr(owner, name, failing(getattr(owner, name), error, sometimes))
        results = [r for i in range(0, 60, 6) for r in await together(engine, asks[i : i + 6])]
    right = [(p, r) for p, r in zip(prompts, results, strict=True) if isinstance(r, GenerateResult)]
    assert {type(result) for result in results} == {GenerateResult, InfrastructureFault}
    assert worst(reference(llama), *right) < TOLERANCE
    memory = engine.batch.memory
    assert memory.running_bytes + memory.cache.bytes <= memory.budget
    assert held_rows(engine) == 0 and engine.batch.admission.places == engine.config.max_batch


def boom(*_: Any) -> Any:
    raise KeyError("boom")


@DIES
@pytest.mark.parametrize("error", [KeyError("boom"), MemoryError("boom")])
async def test_a_thread_that_ends_fails_all_that_is_open_tells_why_and_takes_no_more(
    tmp_path: Path, llama: Path, engine: LocalEngine, error: Exception
) -> None:
    reached, go = asyncio.Event(), threading.Event()
    told = asyncio.get_running_loop()
    update, _ = noised(tmp_path, llama, 1)

    def dying(*_: Any) -> Any:
        told.call_soon_threadsafe(reached.set)
        go.wait(ENOUGH_S)
        raise error

    before_forward(engine, dying)
    deaths = [asyncio.create_task(engine.died()) for _ in range(2)]
    async with asyncio.timeout(ENOUGH_S):
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(engine.generate(r)) for r in SIBLINGS]
        await reached.wait()  # what comes now stays before the thread's door
        tasks += [asyncio.create_task(engine.generate(request)) for request in SIBLINGS]
        await asyncio.sleep(0)
        deaths[0].cancel()  # one who no longer listens leaves the others be
        go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        reason = await deaths[1]
        assert reason == engine.ended == f"the engine's thread has ended: {error!r}"
        assert failures(results) == [reason] * 4
        assert await engine.died() == reason  # also to who asks late
        for late in (engine.generate(SIBLINGS[0]), engine.load(update)):
            with pytest.raises(InfrastructureFault, match="boom"):
                await late


def before_forward(engine: LocalEngine, hook: Callable[..., None]) -> None:
    decoder: Any = engine.batch.decoder
    forward = decoder.forward

    def hooked(*arguments: Any) -> torch.Tensor:
        hook()
        return forward(*arguments)

    decoder.forward = hooked


def failing_module(engine: LocalEngine, fails: Iterator[bool]) -> None:
    """The model raises like CUDA as often as ``fails`` says, then works."""

    def hook() -> None:
        if next(fails, False):
            raise RuntimeError("CUDA error: device-side assert triggered")

    before_forward(engine, hook)


@DIES
async def test_an_error_that_stays_ends_the_thread_with_its_third_step(engine: LocalEngine) -> None:
    failing_module(engine, itertools.repeat(True))
    said = [failures(await together(engine, SIBLINGS))[0] for _ in range(FAILED_STEPS)]
    why = "CUDA error: device-side assert triggered"
    reason = f"the engine's thread has ended: RuntimeError('3 steps failed one after another, the last with: {why}')"
    assert said == [f"engine step failed: {why}"] * 2 + [reason]
    async with asyncio.timeout(ENOUGH_S):
        assert await engine.died() == engine.ended == reason
        with pytest.raises(InfrastructureFault, match="device-side assert"):
            await engine.generate(SIBLINGS[0])


async def test_steps_that_fail_with_one_between_that_succeeds_never_end_the_thread(
    llama: Path, engine: LocalEngine
) -> None:
    failing_module(engine, itertools.cycle([True, True, False]))
    done: list[tuple[np.ndarray, GenerateResult]] = []
    for seed in range(3 * FAILED_STEPS):
        (result,) = await together(engine, [GenerateRequest(ids(seed, 9), 2, Sampling(1))])
        assert isinstance(result, GenerateResult) == (seed % 3 == 2)
        if isinstance(result, GenerateResult):
            done.append((ids(seed, 9), result))
    assert engine.ended == ""
    assert worst(reference(llama), *done) < TOLERANCE


@DIES
async def test_weights_taken_in_part_are_never_sampled_from(
    local: Local, tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that fails midway leaves a mixture: the actor ends, and is started anew with the
    newest weights."""
    update, _ = noised(tmp_path, llama, 1)

    def cut(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(whole(path), 3)
        raise OSError("the file system is gone")

    whole = local_engine.weights.whole
    monkeypatch.setattr(local_engine.weights, "whole", cut)
    engine = await local()
    async with asyncio.timeout(ENOUGH_S):
        with pytest.raises(InfrastructureFault, match="taken in part"):
            await engine.load(update)
        assert "the file system is gone" in await engine.died()
        with pytest.raises(InfrastructureFault, match="taken in part"):
            await engine.generate(SIBLINGS[0])


async def test_a_close_fails_what_is_open_and_is_no_death(engine: LocalEngine) -> None:
    gone = asyncio.create_task(engine.died())
    tasks = [asyncio.create_task(engine.generate(LONG)) for _ in range(2)]
    while not engine.counts["decoded_tokens"]:
        await asyncio.sleep(0)
    await engine.close()
    for call in (*tasks, engine.generate(LONG)):  # one runs, one waits, one comes too late
        with pytest.raises(InfrastructureFault, match="closed"):
            await call
    assert not gone.done() and "closed" in engine.ended
    gone.cancel()


@DIES
async def test_an_actor_whose_engine_died_fails_its_calls_and_ends(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RadixBatch, "forward", boom)
    settings = ActorsConfig(dtype="float32", max_context=256)
    async with bench(tmp_path) as b, asyncio.timeout(ENOUGH_S):
        (tmp_path / "endpoint").write_text(b.dispatcher.endpoint)
        actor = asyncio.create_task(
            worker.run(ActorProcess("actor-0", str(tmp_path), 0, str(llama), settings))
        )
        await b.dispatcher.wait_for("generate", 1, ENOUGH_S)
        call = asyncio.create_task(b.dispatcher.call("generate", SIBLINGS[0], deadline=ENOUGH_S))
        with pytest.raises(InfrastructureFault, match=r"actor-0: the engine.*ended.*boom"):
            await actor
        call.cancel()
        await asyncio.wait([call])


@DIES
async def test_a_server_says_that_its_engine_is_dead_and_why(llama: Path) -> None:
    async with serving(llama) as client, asyncio.timeout(ENOUGH_S):
        health = client.url.replace("/v1", "/health")
        async with client.session.get(health) as answer:
            assert answer.status == 200
        before_forward(client.engine, boom)
        for _ in range(2):
            status, reply = await client.post("completions", {"prompt": "a tree"})
            assert (status, "boom" in str(reply)) == (503, True)
        async with client.session.get(health) as answer:
            assert (answer.status, "has ended: KeyError" in await answer.text()) == (503, True)
