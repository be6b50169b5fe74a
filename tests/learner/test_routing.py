"""Routing replay: an engine tells the experts of each token, and the learner routes by them."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.common.routing import Routers
from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.learner.forest.selfcheck import check, wide
from coppice.learner.forest.trees import Path as TokenPath
from coppice.learner.forest.trees import pack
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.table import build
from coppice.scheduler.growth import routing
from coppice.scheduler.growth.tree import Tree
from coppice.wire.messages import NO_EXPERT, GenerateRequest, Sample, Sampling, TrainGroup, Turn
from tests.learner.test_architectures import made

LAYERS, K, EXPERTS = 2, 2, 4
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "olmoe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: made(tmp_path_factory.mktemp(kind), kind) for kind in MIXTURES}


def policy(folder: Path, checkpointing: bool = False) -> TreeModel:
    config = LearnerConfig(
        dtype="float32", lora=LoraConfig(0), routing_replay=True,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    return TreeModel(str(folder), config, 1.0, Ranks(60), routed=True)


def own(model: Any, tokens: np.ndarray) -> np.ndarray:
    """What a model's routers choose for a sequence, int16 [tokens, layers * k]."""
    routers = Routers(model)
    with torch.inference_mode():
        model(torch.as_tensor(tokens, dtype=torch.long)[None])
    return routers.rows()


async def sampled(folder: Path, *requests: GenerateRequest) -> list[list[Sample]]:
    engine = LocalEngine(str(folder), ActorsConfig(dtype="float32"))
    await engine.start()
    try:
        return [(await engine.generate(request)).samples for request in requests]
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", MIXTURES)
def test_an_engine_tells_the_experts_of_every_position_that_is_asked_for(
    kind: str, folders: dict[str, Path]
) -> None:
    prompt = np.arange(1, 30, dtype=np.int32)

    def request(start: int, n: int) -> GenerateRequest:
        return GenerateRequest(prompt, n, Sampling(6, seed=3, experts_from=start))

    # the second request finds its prompt in the cache
    requests = [request(0, 3), request(0, 2), request(len(prompt) - 1, 1)]
    answers = asyncio.run(sampled(folders[kind], *requests))
    model = policy(folders[kind]).causal
    for asked, samples in zip(requests, answers, strict=True):
        for sample in samples:
            tokens = np.concatenate([prompt, sample.tokens[:-1]])
            expected = own(model, tokens)[asked.sampling.experts_from :]
            assert sample.experts is not None
            assert np.array_equal(np.sort(sample.experts), np.sort(expected))


def planted(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Random experts, int16 [tokens, layers * k]."""
    rows = [rng.permutation(EXPERTS)[:K] for _ in range(tokens * LAYERS)]
    return np.array(rows, np.int16).reshape(tokens, LAYERS * K)


def told(tree: Tree, rng: np.random.Generator, blank: bool = False) -> TrainGroup:
    """Grow a prompt with two actions, one of which goes on, with random experts. blank: the prompt
    is below a root without tokens, as an agent's is."""
    root = tree.add(None, "prompt", np.zeros(0, np.int32), "") if blank else None
    root = tree.add(root, "prompt", np.arange(1, 9, dtype=np.int32), "")

    def act(parent: Any, n: int) -> Any:
        path = tree.path(parent)
        start = routing.first_unknown(path)
        length = tree.length(parent)
        experts, filled, _ = routing.fill(path, planted(rng, length + n - 1 - start), n)
        assert all(node.experts is not None for node in filled)
        fields = {"logprobs": np.zeros(n, np.float32), "versions": np.zeros(n, np.int32)}
        tokens = rng.integers(10, 250, n).astype(np.int32)
        return tree.add(parent, "action", tokens, "", experts=experts, **fields)

    first, second = act(root, 4), act(root, 5)
    observation = tree.add(first, "observation", np.arange(3, 9, dtype=np.int32), "")
    third = act(observation, 3)
    turns = [Turn(node.id, 0, 1, {"outcome": 1.0}) for node in (second, third)]
    return TrainGroup(0, 0, [node.travels({}) for node in tree.nodes.values()], turns)


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_forest_is_routed_as_its_nodes_tell_and_as_path_by_path(
    kind: str, checkpointing: bool, folders: dict[str, Path]
) -> None:
    group = told(Tree(0, "task"), np.random.default_rng(1))
    paths = build([group], {(0, node.id): node for node in group.nodes}).paths
    model = policy(folders[kind], checkpointing)
    assert model.routers is not None
    for path in paths:
        assert path.experts is not None
        with torch.no_grad():
            values, _ = model.read(pack([path]), attention="causal")
        forced = by_hand(folders[kind], path)
        assert torch.allclose(values, forced, atol=1e-5)
        with torch.no_grad():
            free = model.read(pack([TokenPath(path.tokens, path.start)]), attention="causal")[0]
        assert (free - forced).abs().max() > 1e-3, "the planted experts change something"
    check(model, paths)
    model.routers.differing()
    model.read(pack(paths))
    sums = model.routers.differing()
    forest = pack(paths)
    assert forest.experts is not None
    routers = LAYERS - (kind == "glm4_moe")
    assert sums["compared"] == routers * int((forest.experts >= 0).any(1).sum())
    assert 0 < sums["differing"] <= sums["compared"]


def by_hand(folder: Path, path: TokenPath) -> torch.Tensor:
    """The log-probabilities of a path's action, with routers that are written here."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert path.experts is not None
    rows = torch.as_tensor(path.experts, dtype=torch.long).unflatten(1, (LAYERS, K))

    def route(router: Any, given: torch.Tensor, hidden: torch.Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
        grouped = hasattr(router, "e_score_correction_bias")
        scores = logits.sigmoid() if grouped else logits.softmax(-1)
        chosen = torch.where(given >= 0, given, scores.topk(K, -1).indices)
        weights = scores.gather(1, chosen)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen

    for number, layer in enumerate(model.get_decoder().layers):
        for module in layer.modules():
            if hasattr(module, "top_k") and hasattr(module, "num_experts"):
                module.forward = functools.partial(route, module, rows[:, number])
    tokens = torch.as_tensor(np.asarray(path.tokens), dtype=torch.long)
    with torch.inference_mode():
        logits = model(tokens[None]).logits[0, path.start - 1 : -1].log_softmax(-1)
    return logits.gather(1, tokens[path.start :, None])[:, 0]


def test_the_first_choice_of_a_node_stays_and_others_are_counted() -> None:
    tree, rng = Tree(0, "task"), np.random.default_rng(0)
    root = tree.add(None, "prompt", np.arange(5, dtype=np.int32), "")
    first, again = planted(rng, 7), planted(rng, 7)
    again[0] = first[0]
    action, filled, conflicts = routing.fill([root], first, 3)
    assert [node.id for node in filled] == [root.id] and not conflicts
    assert root.experts is not None
    rows = root.experts.reshape(5, -1)
    assert (rows[0] == NO_EXPERT).all() and np.array_equal(rows[1:], first[:4])
    assert np.array_equal(action.reshape(3, -1), first[4:])
    assert routing.fill([root], again, 3)[1:] == ([], 3)
    assert routing.first_unknown([root]) == 4


def test_other_widths_and_models_without_routers_are_refused(folders: dict[str, Path]) -> None:
    path = TokenPath(np.arange(5), 3, experts=np.zeros((5, 4), np.int16))
    other = TokenPath(np.arange(6), 3, experts=np.zeros((6, 6), np.int16))
    with pytest.raises(ValueError, match="expected one number"):
        pack([path, other])
    wide = TokenPath(np.arange(5), 3, experts=np.full((5, 4), EXPERTS, np.int16))
    with pytest.raises(ValueError, match="the engine's model is another one"):
        policy(folders["qwen3_moe"]).read(pack([wide]))
    dense = made(folders["olmoe"].parent / "dense", "llama")
    with pytest.raises(ValueError, match="no router of experts"):
        policy(dense)


def test_the_self_check_computes_experts_in_float32(folders: dict[str, Path]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folders["qwen3_moe"], dtype=torch.bfloat16)
    experts = model.get_decoder().layers[0].mlp.experts
    torch.manual_seed(0)
    inputs = torch.randn(6, 32), torch.tensor([[0, 1], [2, 3]] * 3), torch.full((6, 2), 0.5)
    with torch.inference_mode(), wide():
        values = experts(*inputs)
    with torch.inference_mode():
        expected = experts.float()(*inputs)
    assert (values - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_root_without_tokens_has_no_experts_and_the_others_keep_theirs() -> None:
    paths = []
    for blank in (False, True):
        tree = Tree(0, "task")
        group = told(tree, np.random.default_rng(1), blank)
        assert routing.first_unknown(tree.path([*tree.nodes.values()][-1])) > 8
        paths.append(build([group], {(0, node.id): node for node in group.nodes}).paths)
    for plain, below in zip(*paths, strict=True):
        assert plain.experts is not None and below.experts is not None
        assert np.array_equal(plain.experts, below.experts)
