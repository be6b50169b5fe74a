"""prefix-grouper: one prompt and its answers are a row. Each distinct prompt, also one inside
another, is a group of its own, and ``include_prefix_last=1`` keeps the first token of an answer. A
float64 function stands in for FlashAttention 2."""

from typing import Any

import torch
from prefix_grouper import PrefixGrouper  # pyright: ignore[reportMissingImports]
from prefix_grouper.utils import register_transformers  # pyright: ignore[reportMissingImports]
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

from coppice.research.packers import PackCounts, PackingCase, TrainedPath, causal_attention, head

register_transformers.register_attention()
attention = "prefix_grouper_attention"
AttentionMaskInterface.register(attention, lambda **_: None)


def _exact(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
    scaling: float, sliding_window: int | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    output = causal_attention(query, key, value, scaling, sliding_window, ~mask)
    return output.transpose(1, 2), None


AttentionInterface.register("exact", _exact)


def lacks(case: PackingCase) -> str:
    if case.config.model_type == "lfm2":
        return "it changes attention alone"
    return ""


def _rows(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [torch.tensor(row) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True), mask.bool()


def prepare(paths: list[TrainedPath]) -> dict[str, Any]:
    groups: dict[tuple[int, ...], list[TrainedPath]] = {}
    for path in paths:
        groups.setdefault(tuple(path.tokens[: path.start]), []).append(path)
    ordered = [path for group in groups.values() for path in group]
    return {
        "prompts": _rows([list(prompt) for prompt in groups]),
        "answers": _rows([path.tokens[path.start :] for path in ordered]),
        "sizes": [len(group) for group in groups.values()],
        "weights": torch.tensor([path.weight for path in ordered], dtype=torch.float64),
    }


def pack(batch: dict[str, Any]) -> dict[str, Any]:
    prompts, answers = batch["prompts"], batch["answers"]
    grouper = PrefixGrouper.from_ungrouped_masks(prompts[1], answers[1], batch["sizes"])
    return batch | {"grouper": grouper, "ids": grouper.concat_input(*prompts, *answers)}


def count(packed: dict[str, Any]) -> PackCounts:
    tokens = keys = pairs = 0
    for group in packed["grouper"].group_info:
        prompt, answers = group.prefix_len, sum(group.suffix_lens)
        tokens += prompt + answers
        keys += prompt + sum(prompt + one for one in group.suffix_lens)
        pairs += sum(one * (one + 1) // 2 for one in [prompt, *group.suffix_lens])
        pairs += answers * prompt
    return PackCounts(tokens, keys, tokens, pairs)


def logprobs(causal: Any, packed: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    grouper, ids = packed["grouper"], packed["ids"]
    answers, mask = packed["answers"]
    positions = torch.zeros_like(ids)
    for row, group in enumerate(grouper.group_info):
        starts = [0] + [group.prefix_len] * group.num_samples
        runs = [torch.arange(a, a + n) for a, n in zip(starts, group, strict=True)]
        positions[row, : group.total_len] = torch.cat(runs)
    hidden = causal.get_decoder()(
        input_ids=ids, position_ids=positions, use_cache=False, prefix_grouper=grouper,
        prefix_grouper_attn_func="exact",
    ).last_hidden_state  # fmt: skip
    _, _, hidden, read = grouper.split_output(hidden, include_prefix_last=1)
    weights = packed["weights"][:, None].expand(mask.shape)[mask]
    return weights, head(causal, hidden[:, :-1][read[:, 1:]], answers[mask])
