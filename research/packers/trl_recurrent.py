"""tree-recurrence: lets recurrent layers follow a row that TRL packed."""

from typing import Any

import torch
import tree_recurrence

from coppice.research.packers import trl_row
from coppice.research.packers.trl_row import attention, count, pack, prepare  # noqa: F401


def logprobs(causal: Any, packed: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    support = tree_recurrence.install(causal)
    if not support.shares_prefixes:
        raise ValueError(support.reason)
    return trl_row.logprobs(causal, packed)
