"""The embedded engine on prompts with pictures: the learner's log-probabilities, in any chunks,
from any cache, after any update."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.servers import Sampled
from coppice.actors.engines.sglang import SGLangEngine
from coppice.common import vision
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.forest.trees import pack
from coppice.learner.model.model import TreeModel
from coppice.learner.model.publish import publish
from coppice.learner.model.ranks import Ranks
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, Sampling
from tests import tiny
from tests.actors.conftest import Local
from tests.actors.test_local_engine import TOLERANCE
from tests.pictures import squares
from tests.updates import process

PICTURES = {1: squares(1, 2, 3), 2: squares(2), 3: squares(3), 4: squares(4, 3, 4)}
SIZES = {1: 6, 2: 4, 3: 4, 4: 12}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_vision(tmp_path_factory.mktemp(request.param), request.param)


def prompt(*numbers: int) -> np.ndarray:
    tokens = [*range(5)]
    for i, n in enumerate(numbers):
        tokens += [260, *vision.ids(n, SIZES[n]), 261, 50 + i]
    return np.array([*tokens, 7, 8], np.int32)


def asked(*numbers: int, n: int = 2) -> GenerateRequest:
    images = {number: PICTURES[number] for number in numbers}
    return GenerateRequest(prompt(*numbers), n, Sampling(8, seed=sum(numbers)), images)


def policy(folder: Path, run: Path, rank: int = 0, **settings: Any) -> TreeModel:
    config = process(folder, run, rank, **settings).learner
    return TreeModel(str(folder), config, 1.0, Ranks(60))


def assert_equal(learner: TreeModel, request: GenerateRequest, result: GenerateResult) -> None:
    assert len(result.samples) == request.n
    for sample in result.samples:
        whole = np.concatenate([request.tokens, sample.tokens]).astype(np.int64)
        path = Tokens(whole, len(request.tokens), PICTURES)
        with torch.no_grad():
            expected = learner.read(pack([path]), attention="causal")[0].numpy()
        assert np.abs(expected - sample.logprobs).max() < TOLERANCE


@pytest.mark.second
@pytest.mark.parametrize("chunk", [3, 512])
async def test_samples_have_the_learners_logprobs(
    local: Local, folder: Path, tmp_path: Path, chunk: int
) -> None:
    engine, learner = await local(folder, prefill_tokens=chunk), policy(folder, tmp_path)
    requests = [asked(1), asked(2, 3), asked(4, 1, 2), asked(n=3), asked(3, 3, n=1), asked(2)]
    results = await asyncio.gather(*(engine.generate(request) for request in requests))
    for request, result in zip(requests, results, strict=True):
        assert_equal(learner, request, result)


async def test_the_cache_tells_pictures_of_one_size_apart_and_shares_what_is_equal(
    local: Local, seeing: Path, tmp_path: Path
) -> None:
    engine, learner = await local(seeing), policy(seeing, tmp_path)
    cached = []
    for request in [asked(1, 2), asked(1, 3), asked(1, 2), asked(1, 2, 4)]:
        result = await engine.generate(request)
        cached.append(result.cached_tokens)
        assert_equal(learner, request, result)
    before_second = 5 + 1 + 6 + 2 + 1
    whole = len(prompt(1, 2))
    assert cached == [0, before_second, whole, whole - 2]


@pytest.mark.parametrize(("rank", "train_vision"), [(0, True), (4, False), (4, True)])
async def test_published_weights_come_into_force(
    local: Local, seeing: Path, tmp_path: Path, rank: int, train_vision: bool
) -> None:
    engine = await local(seeing)
    learner = policy(seeing, tmp_path, rank, train_vision=train_vision)
    before = await engine.generate(asked(1, 2))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in learner.trained().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    published = publish(learner, 1, tmp_path, 3)
    await engine.load(LoadRequest(1, published.path, published.digest))
    after = await engine.generate(asked(1, 2))
    assert_equal(learner, asked(1, 2), after)
    with pytest.raises(AssertionError):
        assert_equal(learner, asked(1, 2), before)


async def test_pictures_that_do_not_fit_are_refused(local: Local, seeing: Path) -> None:
    engine = await local(seeing)
    missing = msgspec.structs.replace(asked(1), images={})
    other = msgspec.structs.replace(asked(1), images={1: PICTURES[2]})
    for wrong, said in ((missing, r"pictures \[1\] are in"), (other, "expected 2 x 2")):
        with pytest.raises(DataFault, match=said):
            await engine.generate(wrong)
    with pytest.raises(DataFault, match="token ids from -1"):
        await (await local()).generate(asked(1))


def answered(read: list[int]) -> Sampled:
    return Sampled([], [], "stop", "", [], len(read), 0, read)


def test_sglang_is_sent_a_placeholder_per_picture_and_must_have_read_it(seeing: Path) -> None:
    settings = SGLangConfig(way="url", urls=["http://127.0.0.1:1"])
    engine = SGLangEngine(str(seeing), ActorsConfig(max_context=256, sglang=settings))
    request = asked(1, 2, 1)
    ids = [*range(5), 260, 262, 261, 50, 260, 262, 261, 51, 260, 262, 261, 52, 7, 8]
    for body in engine._bodies(request):
        images = [base64.b64decode(one.partition(",")[2]) for one in body["image_data"]]
        assert images == [PICTURES[n] for n in (1, 2, 1)]
        assert body["input_ids"] == ids and body["return_prompt_token_ids"]
    assert "image_data" not in engine._bodies(asked())[0]
    read = np.where(request.tokens < 0, 262, request.tokens).tolist()
    engine._check_read(request, [answered(read)])
    for wrong in (read[1:], [9, *read[1:]], []):
        with pytest.raises(InfrastructureFault, match="expected the tree's 32"):
            engine._check_read(request, [answered(wrong)])
