"""What every engine promises, against transformers itself: the embedded engine in both number types
and real servers of SGLang and vLLM, on the same tiny model. The truth is always a full forward in float32."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tokenizers
import torch

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.base import Engine
from coppice.actors.engines.local import LocalEngine
from coppice.actors.engines.sglang import SGLangEngine
from coppice.actors.engines.vllm import VLLMEngine
from coppice.common.support import decode
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Constraint, GenerateRequest, LoadRequest, Sampling
from tests.actors.test_local_engine import TOLERANCE, forward, full_logprobs, ids, noised, reference
from tests.sglang_cpu.scripted import published
from tests.sglang_cpu.shared import Shared as Server
from tests.vllm_cpu.shared import BLOCK

BFLOAT16_DIFFERENCE = 0.05
"""Mean difference over a few tokens between log-probabilities in bfloat16 and float32 on the tiny
model: 0.013 for transformers and for the engine, with and without vector instructions; 0.33 when
the first token of the prompt is not seen."""


def rounds(engine: Engine) -> bool:
    on_gpu = isinstance(engine, SGLangEngine) and torch.cuda.is_available()
    return on_gpu or getattr(engine, "dtype", torch.float32) == torch.bfloat16


def near(engine: Engine, expected: np.ndarray, logprobs: np.ndarray, times: float = 1.0) -> bool:
    """Whether log-probabilities are those of a float32 forward up to rounding. times: what more an
    engine in float32 may differ."""
    apart = np.abs(expected - logprobs)
    if rounds(engine):
        return bool(apart.mean() < BFLOAT16_DIFFERENCE)
    return bool(apart.max() < times * TOLERANCE)


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Path:
    vllm = request.node.callspec.params["engine"] == "vllm"
    return request.getfixturevalue("wide" if vllm else "llama")


@pytest_asyncio.fixture(params=["local-float32", "local-bfloat16", "sglang", "vllm"])
async def engine(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param.startswith("local"):
        dtype = request.param.removeprefix("local-")
        made: Any = LocalEngine(str(base), ActorsConfig(dtype=dtype, max_context=512, max_batch=8))
        await made.start()
        yield made
        await made.close()
        return
    server: Server = request.getfixturevalue(f"{request.param}_server")
    made = server.engine()
    await made.start()
    await restore(made, base, tmp_path)
    yield made
    await made.close()


async def begun(engine: Engine, request: GenerateRequest) -> asyncio.Task[Any]:
    """A generation of ``request`` that is under way. On a busy machine one may end before a server
    says that it runs; then another begins."""
    async with asyncio.timeout(120):
        while True:
            task = asyncio.create_task(engine.generate(request))
            while not task.done():
                if await runs(engine, request):
                    return task
            await task


async def runs(engine: Engine, request: GenerateRequest) -> bool:
    """Whether samples of ``request`` are under way, with most of their tokens to come."""
    if isinstance(engine, LocalEngine):
        await asyncio.sleep(0)
        return bool(engine.stats().get("decoded_tokens"))
    await asyncio.sleep(0.01)
    client: Any = getattr(engine, "way").front.client  # noqa: B009
    if isinstance(engine, VLLMEngine):
        told = (await client.send("GET", "/metrics")).decode()
        return float(re.findall(r"^vllm:num_requests_running\S* (\S+)", told, re.M)[0]) > 0
    held = (await client.get("/v1/loads"))["loads"][0]["num_total_tokens"]
    return held >= request.n * (len(request.tokens) + 3)


async def sampled(engine: Engine, prompt: np.ndarray, n: int, *args: Any, **fields: Any) -> Any:
    return (await engine.generate(GenerateRequest(prompt, n, Sampling(*args, **fields)))).samples


async def restore(made: Any, folder: Path, scratch: Path) -> None:
    base, _ = noised(scratch, folder, 0, noise=0.0)
    await made.load(base)


async def test_greedy_tokens_are_those_of_a_full_forward(engine: Engine, base: Path) -> None:
    prompt, model = ids(1, 24), reference(base)
    (sample,) = await sampled(engine, prompt, 1, 8, temperature=0.0)
    best = forward(model, prompt, sample.tokens).log_softmax(-1).max(-1).values.numpy()
    # the most probable token at each place, or one that rounding cannot tell from it
    assert near(engine, best, sample.logprobs)
    assert near(engine, full_logprobs(model, prompt, sample.tokens), sample.logprobs)
    assert sample.versions.tolist() == [0] * len(sample.tokens)


async def test_logprobs_are_of_the_distribution_after_temperature(
    engine: Engine, base: Path
) -> None:
    prompt, model = ids(2, 20), reference(base)
    for sample in await sampled(engine, prompt, 3, 6, temperature=0.7):
        rows = forward(model, prompt, sample.tokens) / 0.7
        expected = rows.log_softmax(-1)[range(len(rows)), sample.tokens.tolist()].numpy()
        assert near(engine, expected, sample.logprobs)


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 5}, {"top_p": 0.7, "top_k": 20}])
@pytest.mark.parametrize("n", [1, 2])
async def test_logprobs_are_of_the_softmax_over_the_support_that_is_reported(
    engine: Engine, base: Path, cut: dict[str, Any], n: int
) -> None:
    prompt, model = ids(3, 20), reference(base)
    told = not isinstance(engine, VLLMEngine)
    for sample in await sampled(engine, prompt, n, 6, temperature=0.8, support=told, **cut):
        rows = forward(model, prompt, sample.tokens) / 0.8
        left = torch.zeros_like(rows, dtype=torch.bool)
        if told:
            support = decode(sample.support, len(sample.tokens))
            assert support is not None
            assert support.has(sample.tokens).all()
            assert (support.counts > 0).all() and (support.counts <= cut.get("top_k", 259)).all()
            left[torch.as_tensor(support.places), torch.as_tensor(support.ids)] = True
        else:
            left = kept(rows, **cut)
        logs = rows.masked_fill(~left, -torch.inf).log_softmax(-1)
        expected = logs[range(len(rows)), sample.tokens.tolist()].numpy()
        assert near(engine, expected, sample.logprobs, times=10.0)
        if "top_k" not in cut and not rounds(engine):
            mass = (rows.softmax(-1) * left).sum(-1)
            assert (mass > cut["top_p"] - 1e-4).all()


async def test_samples_of_one_prefix_differ_and_the_prefix_is_computed_once(engine: Engine) -> None:
    prompt = ids(4, 60)
    before = engine.stats().get("prefilled_tokens", 0.0)
    start = time.monotonic()
    first = await engine.generate(GenerateRequest(prompt, 4, Sampling(6)))
    assert 0 < sum(first.phases.values()) <= time.monotonic() - start
    assert list(first.phases)[-2:] == ["prefill", "decode"] and min(first.phases.values()) >= 0
    computed = engine.stats()["prefilled_tokens"] - before
    assert (first.cached_tokens, first.prompt_tokens) == (0, 60)
    block = BLOCK if isinstance(engine, VLLMEngine) else 1  # what a cache has of a prefix
    # servers compute a prompt's last block again for each sample
    assert 60 <= computed <= 60 + 4 * block
    assert len({tuple(sample.tokens.tolist()) for sample in first.samples}) > 1
    child = np.concatenate([prompt, first.samples[0].tokens, ids(5, 4)])
    second = await engine.generate(GenerateRequest(child, 1, Sampling(2)))
    # the last sampled token was never computed
    assert second.cached_tokens == (len(child) - 5) // block * block


async def test_finish_reasons(engine: Engine, base: Path) -> None:
    prompt = ids(6, 12)
    (free,) = await sampled(engine, prompt, 1, 10, temperature=0.0)
    assert free.finish == "length"
    stop = tokenizer(base).decode(free.tokens.tolist())[3:5]
    (stopped,) = await sampled(engine, prompt, 1, 10, temperature=0.0, stop=[stop])
    assert stopped.finish == "stop"
    assert stop in tokenizer(base).decode(stopped.tokens.tolist())
    assert len(stopped.logprobs) == len(stopped.tokens) < len(free.tokens)


@pytest.mark.second
async def test_cancelling_frees_the_engine(engine: Engine) -> None:
    task = await begun(engine, GenerateRequest(ids(8, 10), 4, Sampling(400)))
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0.5)
    before = engine.stats().get("decoded_tokens", 0.0)
    samples = await sampled(engine, ids(9, 10), 8, 2)  # all the room there is
    assert len(samples) == 8
    # and nothing else ran
    assert engine.stats()["decoded_tokens"] - before == sum(len(s.tokens) for s in samples)


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(ids(0, 5), 0, Sampling(5)),
        GenerateRequest(ids(0, 500), 1, Sampling(20)),
        GenerateRequest(ids(0, 0), 1, Sampling(5)),
        GenerateRequest(ids(0, 5), 99, Sampling(5)),
        GenerateRequest(ids(0, 5), 1, Sampling(5, top_p=0.0)),
        GenerateRequest(ids(0, 5), 1, Sampling(5, temperature=1e-300)),
        GenerateRequest(ids(0, 5), 1, Sampling(5, top_logprobs=21)),
        GenerateRequest(np.array([1, 260], np.int32), 1, Sampling(5)),
    ],
)
async def test_an_impossible_request_is_a_data_fault(
    engine: Engine, request_: GenerateRequest
) -> None:
    with pytest.raises(DataFault, match="expected"):
        await engine.generate(request_)
    assert len(await sampled(engine, ids(0, 5), 1, 1)) == 1


async def test_a_new_version_is_sampled_from_and_reads_no_other_versions_cache(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    prompt = ids(10, 30)
    await engine.generate(GenerateRequest(prompt, 1, Sampling(2)))
    update, model = noised(tmp_path, base, 3)
    loaded = await engine.load(update)
    assert (loaded.version, loaded.digest) == (3, update.digest)
    result = await engine.generate(GenerateRequest(prompt, 2, Sampling(5)))
    assert result.cached_tokens == 0
    for sample in result.samples:
        assert sample.versions.tolist() == [3] * len(sample.tokens)
        assert near(engine, full_logprobs(model, prompt, sample.tokens), sample.logprobs)
    assert engine.stats()["version"] == 3


@pytest.mark.second
async def test_an_update_labels_each_token(engine: Engine, base: Path, tmp_path: Path) -> None:
    # vLLM on a CPU dies when a prompt in parts has a seed, and the interrupted samples are prompts
    seed = None if isinstance(engine, VLLMEngine) else 1
    request = GenerateRequest(ids(11, 10), 8, Sampling(400, seed=seed))
    last = 0
    for version in range(4, 12):  # a server may end all samples before it takes the update
        update, _ = noised(tmp_path, base, version)
        task = await begun(engine, request)
        await engine.load(update)
        labels = [sample.versions.tolist() for sample in (await task).samples]
        assert labels == [sorted(versions) for versions in labels]
        assert {int(label) for versions in labels for label in versions} <= {last, version}
        if frozenset({last, version}) in map(frozenset, labels):
            assert all(len(versions) < 400 or versions[-1] == version for versions in labels)
            return
        last = version
    pytest.fail("eight updates came after the last token")


async def test_weights_that_are_not_as_announced_are_refused_and_the_old_ones_serve(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    update, _ = noised(tmp_path, base, 5)
    (before,) = await sampled(engine, ids(12, 12), 1, 6, temperature=0.0)
    file = Path(update.path, "model.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"bits")
    with pytest.raises(InfrastructureFault, match="digest"):
        await engine.load(update)
    (after,) = await sampled(engine, ids(12, 12), 1, 6, temperature=0.0)
    assert before.tokens.tolist() == after.tokens.tolist()
    assert near(engine, before.logprobs, after.logprobs)


async def test_an_adapter_changes_the_policy(engine: Engine, base: Path, tmp_path: Path) -> None:
    update, model = adapted(tmp_path, base, 6)
    await engine.load(update)
    prompt = ids(13, 16)
    for sample in await sampled(engine, prompt, 2, 5):
        assert sample.versions.tolist() == [6] * len(sample.tokens)
        assert near(engine, full_logprobs(model, prompt, sample.tokens), sample.logprobs, times=5.0)


async def test_a_constraint_holds_to_the_last_token(engine: Engine, base: Path) -> None:
    constraint = Constraint("regex", "(yes|no), [0-9]{2}")
    words = tokenizer(base)
    for sample in await sampled(engine, ids(14, 10), 3, 20, constraint=constraint):
        text = words.decode(sample.tokens.tolist(), skip_special_tokens=True)
        assert sample.finish == "stop" and re.fullmatch("(yes|no), [0-9]{2}", text)


def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def kept(rows: torch.Tensor, top_p: float = 1.0, top_k: int = 260) -> torch.Tensor:
    top = rows >= rows.topk(top_k).values[:, -1:]
    masses, order = rows.masked_fill(~top, -torch.inf).softmax(-1).sort(descending=True)
    inside = masses.cumsum(-1) - masses < top_p
    return top & torch.zeros_like(top).scatter(1, order, inside)


def adapted(tmp_path: Path, source: Path, version: int) -> tuple[LoadRequest, Any]:
    """A published adapter of random weights, and the model with it merged in."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(version)
    model: Any = get_peft_model(
        reference(source), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    request = published(tmp_path, version, "lora", get_peft_model_state_dict(model))
    settings = model.peft_config["default"].to_dict()
    settings["target_modules"] = sorted(settings["target_modules"])
    Path(request.path, "adapter_config.json").write_text(json.dumps(settings, default=str))
    return request, model.merge_and_unload().eval()
