"""The tokens of a node, each with its text and its log-probabilities."""

from pathlib import Path

import numpy as np
import tokenizers
from tokenizers.decoders import DecodeStream

from coppice.scheduler.growth.tree import Node
from coppice.tools.inspecting import replay


def tokenizer(run: Path) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of a run's policy, or None if the run's folder or the policy's is not
    there."""
    process = replay.learner(run)
    file = Path(process.model) / "tokenizer.json" if process is not None else None
    return (
        tokenizers.Tokenizer.from_file(str(file)) if file is not None and file.is_file() else None
    )


def pieces(words: tokenizers.Tokenizer | None, tokens: np.ndarray) -> list[str]:
    """Return the text of each token, or its number without a tokenizer. Of a character of several
    tokens, the last one has the text."""
    if words is None:
        return [str(token) for token in tokens.tolist()]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(words, int(token)) or "" for token in tokens]


def lines(words: tokenizers.Tokenizer | None, node: Node, newest: np.ndarray | None) -> list[str]:
    """Return one line per token of an action: its log-probability when it was sampled, that under
    the newest policy if it is known, its text."""
    if node.logprobs is None or not len(node.logprobs):
        return []
    columns = [
        [f"{value:9.4f}" for value in values]
        for values in (node.logprobs, newest)
        if values is not None
    ]
    head = "  sampled" + ("   newest" if newest is not None else "") + "  token"
    return [
        head,
        *(
            "".join(row)
            for row in zip(*columns, (f"  {p!r}" for p in pieces(words, node.tokens)), strict=True)
        ),
    ]
