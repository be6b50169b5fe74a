"""Whether logits are the product of hidden states and the output embeddings alone, as the embedded
engine and the learner compute them."""

from typing import Any

_PLAIN = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}


def check_head(folder: str, text: Any) -> None:
    """Raise ValueError if ``text``, the configuration of a language model, changes the logits after
    the head or the scores of attention."""
    for key, expected in _PLAIN.items():
        value = getattr(text, key, expected)
        if value is not None and value != expected:
            raise ValueError(
                f"{folder}: {key} = {value} changes what the head computes: expected {expected};"
                " take another model (docs/models.md)"
            )
