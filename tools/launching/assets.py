"""What a run needs before its processes start."""

import msgspec


class Assets(msgspec.Struct, frozen=True):
    """Resolved paths. train and heldout are "" when the environment makes its own tasks. retriever
    is an index folder, a URL, or "" for none. judge_model is the folder of [judges.model], or ""
    for none."""

    model: str
    train: str | list[str]
    heldout: str | list[str]
    retriever: str
    judge_model: str = ""
