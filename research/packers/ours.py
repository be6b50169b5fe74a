"""The learner's own forest, read by the learner's own forward. Counts are those of full attention:
a sliding window takes one dense mask, with pairs of all tokens, instead of the cascade."""

from typing import Any
from unittest import mock

import torch

from coppice.learner.forest.attention import NAME, Layout
from coppice.learner.forest.trees import Forest, Path
from coppice.learner.forest.trees import pack as forest_of
from coppice.learner.model import model as learner
from coppice.research.packers import PackCounts, TrainedPath, head

attention = NAME


def prepare(paths: list[TrainedPath]) -> tuple[list[Path], list[float]]:
    weights = [path.weight for path in paths for _ in path.tokens[path.start :]]
    return [Path(path.tokens, path.start) for path in paths], weights


def pack(batch: tuple[list[Path], list[float]]) -> tuple[Forest, Layout, torch.Tensor]:
    forest = forest_of(batch[0])
    weights = torch.tensor(batch[1], dtype=torch.float64)
    layout = Layout(forest, "cascade", "cpu")
    layout.block_masks(torch.float32)  # all that one forward builds, as the peers' packings do
    return forest, layout, weights


def count(packed: tuple[Forest, Layout, torch.Tensor]) -> PackCounts:
    forest, layout, _ = packed
    keys = queries = pairs = 0
    for block in layout.blocks:
        rows, columns = block.end - block.start, block.keys_end - block.start
        keys, queries = keys + columns, queries + rows
        above = 0 if block.masked else columns * (columns - 1) // 2
        pairs += rows * columns - above
    return PackCounts(forest.nodes, keys, queries, pairs)


def logprobs(
    causal: Any, packed: tuple[Forest, Layout, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    def exact(hidden: torch.Tensor, _: Any, targets: torch.Tensor, *__: Any) -> Any:
        return (both := head(causal, hidden, targets)), both

    forest, layout, weights = packed
    tower = learner.Tower(causal, 1.0, False, learner.check_layers("the suite's model", causal))
    # the learner's head computes in float32, and has its own tests
    with mock.patch.object(learner, "token_logprobs", exact):
        return weights, tower(layout, forest.depth, None, torch.float64, False)[0]
