"""Forests with pictures: equal to paths read alone, to the model's own forward, and trained like
any others."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from coppice.common import vision
from coppice.common.vision import Vision
from coppice.learner.forest.selfcheck import PackingError, check
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.forest.trees import pack
from coppice.learner.main import pack_batch, unpack_batch
from coppice.learner.update.trainer import Batch
from tests import tiny
from tests.pictures import squares
from tests.updates import episodes, everything, trainer

PICTURES = {1: squares(1, 2, 3), 2: squares(2, 2, 2), 3: squares(3, 2, 2), 4: squares(4, 3, 4)}
SHOWN = {
    number: np.concatenate([[260], vision.ids(number, size), [261]])
    for number, size in {1: 6, 2: 4, 3: 4, 4: 12}.items()
}


def seen(tree: int = 0) -> list[Tokens]:
    """Paths below one picture: turns with pictures of one size, some the same."""
    rng = np.random.default_rng(tree)
    head = np.concatenate([SHOWN[1], np.arange(2)])
    paths = [np.concatenate([head, rng.integers(0, 256, 4)])]
    for numbers in [(2,), (2,), (3,), (3, 2), (4, 3)]:
        said = rng.integers(0, 256, int(rng.integers(2, 6)))
        paths.append(np.concatenate([head, *(SHOWN[n] for n in numbers), [9], said]))
    starts = [len(head)] + [len(path) - 2 for path in paths[1:]]
    return [Tokens(path, start, PICTURES) for path, start in zip(paths, starts, strict=True)]


def by_transformers(folder: Path, path: Tokens) -> torch.Tensor:
    """The log-probabilities of the model's own forward, from pixel values and placeholders."""
    model = vision.load(folder, torch.float32, "eager")
    eyes = Vision.of(folder)
    assert eyes is not None
    ids = np.asarray(path.tokens)
    patches, grids = eyes.pixels([PICTURES[run.number] for run in vision.runs(ids)])
    given = torch.from_numpy(np.where(ids < 0, eyes.token, ids))[None]
    kinds = torch.from_numpy(ids < 0)[None].int()
    pixels = {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.from_numpy(grids)}
    with torch.no_grad():
        logits = model(input_ids=given, mm_token_type_ids=kinds, **pixels).logits[0].log_softmax(-1)
    return logits[torch.arange(path.start - 1, len(ids) - 1), given[0, path.start :]]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_vision(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["dense", "cascade"])
def test_pictures_read_as_by_the_plain_model(folder: Path, tmp_path: Path, attention: Any) -> None:
    policy = trainer(folder, tmp_path, rank=0, attention=attention).policy
    paths = seen()
    forest = pack(paths)
    assert forest.token_ratio > 1.5
    with torch.no_grad():
        packed = policy.read(forest)[0].split([len(p.tokens) - p.start for p in paths])
        for path, logprobs in zip(paths, packed, strict=True):
            alone = policy.read(pack([path]), attention="causal")[0]
            np.testing.assert_allclose(logprobs, by_transformers(folder, path), atol=2e-5)
            np.testing.assert_allclose(alone, logprobs, atol=2e-5)


def test_each_picture_of_a_forest_is_encoded_once(seeing: Path) -> None:
    eyes = Vision.of(seeing)
    assert eyes is not None
    forest = pack(seen())
    view = eyes.view(forest.tokens, PICTURES)
    assert len(view.grids) == 4
    shown = [run.number for run in vision.runs(forest.tokens)]
    # the two turns that show picture 2 first share its tokens
    assert sorted(shown) == [1, 2, 2, 3, 3, 4]
    assert len(view.rows) == (forest.tokens < 0).sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_self_check_holds_with_pictures_and_refuses_wrong_positions(
    seeing: Path, tmp_path: Path, rank: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trainer(seeing, tmp_path, rank, dtype=dtype).policy
    paths = seen() + seen(1)
    assert check(policy, paths)
    places = vision.places

    def flat(tokens: Any, depth: np.ndarray, end: np.ndarray, grids: Any) -> np.ndarray:
        whole = bool((end == len(end)).all())  # a path alone keeps its positions
        return places(tokens, depth, end, grids) if whole else np.stack([depth] * 3)

    monkeypatch.setattr(vision, "places", flat)
    with pytest.raises(PackingError, match="log-probabilities"):
        check(policy, paths)


def pictured(seed: int, version: int) -> Batch:
    batch = episodes(seed, version, trees=2, turns=3, fresh=True)

    def with_picture(node: Any) -> Any:
        if node.kind != "prompt":
            return node
        number = 1 if node.parent < 0 else 2 + node.id // 2 % 2
        tokens = np.concatenate([SHOWN[number], node.tokens]).astype(np.int32)
        return msgspec.structs.replace(node, tokens=tokens, images={number: PICTURES[number]})

    nodes = [(tree, with_picture(node)) for tree, node in batch.nodes]
    return msgspec.structs.replace(batch, nodes=nodes)


@pytest.mark.parametrize("rank", [0, 4])
def test_an_update_leaves_the_vision_tower(seeing: Path, tmp_path: Path, rank: int) -> None:
    made = trainer(seeing, tmp_path, rank, scheme="turn_grpo", gradient_checkpointing=rank == 4)
    assert made.policy.trained()
    assert not any("visual" in name for name in made.policy.trained())
    before = everything(made)
    metrics = made.update(unpack_batch(pack_batch(pictured(6, 0))))  # as other ranks get it
    assert made.checked
    assert metrics["learner/grad_norm"] > 0
    assert any((before[name] != after).any() for name, after in everything(made).items())


@pytest.mark.parametrize("rank", [0, 4])
def test_a_vision_tower_trains_as_on_plain_paths(seeing: Path, tmp_path: Path, rank: int) -> None:
    policy = trainer(seeing, tmp_path, rank, train_vision=True).policy
    assert any("visual" in name for name in policy.trained())
    assert check(policy, seen() + seen(1))
    policy.read(pack(seen()))[0].sum().backward()
    assert all(
        p.grad is not None for name, p in policy.trained().items() if "visual.blocks" in name
    )


def test_what_needs_a_model_with_vision_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_vision has no effect"):
        trainer(llama, tmp_path, train_vision=True)
    with pytest.raises(ValueError, match="the model reads text only"):
        trainer(llama, tmp_path).update(pictured(6, 0))
