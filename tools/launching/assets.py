"""What a run needs before its processes start."""

import msgspec


class Assets(msgspec.Struct, frozen=True):
    """Resolved paths. train, heldout: "" where the environment makes its tasks. retriever: an index folder, a URL, or "" for none.
    judge_model: the folder of [judges.model], "" for none."""

    model: str
    train: str | list[str]
    heldout: str | list[str]
    retriever: str
    judge_model: str = ""
