"""TRL's ``TreeRow`` (AsyncGRPO). Its attention is FlashAttention 3, which no CPU runs: a float64
function with the kernel's arguments stands in for it, so that its packing, not its kernel, is
checked."""

from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.async_grpo import packing  # pyright: ignore[reportMissingImports]

from coppice.research.packers import PackCounts, PackingCase, TrainedPath, causal_attention, head

packing.register_tree_attention()
attention = packing.TREE_ATTENTION


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds_q: torch.Tensor,
    bounds_k: torch.Tensor, *_: Any, softmax_scale: float, window_size: tuple[int, int], **__: Any,
) -> torch.Tensor:  # fmt: skip
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    outputs = []
    for i in range(len(bounds_q) - 1):
        q, k = slice(*bounds_q[i : i + 2].tolist()), slice(*bounds_k[i : i + 2].tolist())
        output = causal_attention(
            *(one.transpose(0, 1)[None] for one in (query[q], key[k], value[k])),
            scale=softmax_scale, window=window,
        )  # fmt: skip
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_varlen)


def lacks(case: PackingCase) -> str:
    if case.config.model_type == "lfm2":
        return "its trainer refuses layers that are no attention"
    return ""


def prepare(paths: list[TrainedPath]) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": torch.tensor(path.tokens), "group_id": path.tokens[0],
            "completion_mask": (torch.arange(len(path.tokens)) >= path.start).long(),
            "old_log_probs": torch.zeros(len(path.tokens)), "advantage": path.weight,
        }
        for path in paths
    ]  # fmt: skip


def pack(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    row = packing.TreeRow()
    for sample in batch:
        row.add(sample)
    return row.pack()


def count(packed: dict[str, torch.Tensor]) -> PackCounts:
    queries, keys = (packed[f"tree_cu_seqlens_{one}"].long().diff() for one in "qk")
    pairs = queries * (keys - queries) + queries * (queries + 1) // 2
    tokens = len(packed["input_ids"])
    return PackCounts(tokens, len(packed["tree_kv_index"]), tokens, int(pairs.sum()))


def logprobs(causal: Any, packed: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    tree: dict[str, Any] = {key: value for key, value in packed.items() if key.startswith("tree_")}
    lengths = tree.pop("tree_max_seqlens").tolist()
    tree["tree_max_seqlen_q"], tree["tree_max_seqlen_k"] = lengths
    ids = {key: packed[key][None] for key in ("input_ids", "position_ids")}
    hidden = causal.get_decoder()(**ids, **tree, use_cache=False).last_hidden_state[0]
    read = packed["token_index"]
    return packed["advantages"].double(), head(causal, hidden[read], packed["shift_labels"][read])
