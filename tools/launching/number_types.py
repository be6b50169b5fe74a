"""The number type in which a run computes: where it is set, what follows from it, and how it is
told."""

from pathlib import Path
from typing import Any

import msgspec

from coppice.common import hardware
from coppice.tools.launching.settings import Config


def typed(config: Config) -> Config:
    """Return the config with model.dtype written to the rooms that name no number type, and to the
    arguments of SGLang where actors start it."""
    dtype, a, w, replace = (
        config.model.dtype,
        config.actors,
        config.learner,
        msgspec.structs.replace,
    )
    w = replace(w, dtype=dtype if w.dtype == "auto" else w.dtype)
    if a.engine != "sglang":
        a = replace(a, dtype=dtype if a.dtype == "auto" else a.dtype)
    elif a.sglang.way != "url" and dtype != "auto":
        a = replace(a, sglang=replace(a.sglang, arguments={"dtype": dtype} | a.sglang.arguments))
    return replace(config, actors=a, learner=w)


def number_type(config: Config, model: Path | None = None) -> str:
    """Describe the number type in which the run computes, the reason for it, and the setting that
    changes it. model: the policy's folder."""
    config = typed(config)
    learner, why = hardware.dtype_and_reason(config.learner.dtype)
    actors, reason = _acting(config, model)
    if not actors:
        return f"number type of the learner: {learner} ({why}; model.dtype); that of the SGLang servers is their own and must be the same"
    if actors != learner:
        return (
            f"warning: the learner computes in {learner} ({why}) and the actors in {actors} ({reason}): the log-probabilities of the same"
            " tokens then differ by rounding, which the correction cannot tell from staleness; set model.dtype, and neither learner.dtype,"
            " actors.dtype nor actors.sglang.arguments.dtype"
        )
    chosen = learner == "bfloat16" and config.learner.dtype == "auto"
    change = "; --set model.dtype=float32 changes it" if chosen else ""
    return f"number type {learner} ({why}{change})"


def _acting(config: Config, model: Path | None) -> tuple[str, str]:
    """Return the number type of the actors and the reason; "" if only a server that runs elsewhere,
    or a model not yet here, could tell."""
    a = config.actors
    if a.engine != "sglang":
        return hardware.dtype_and_reason(a.dtype)
    argument = str(a.sglang.arguments.get("dtype", "auto"))
    if argument != "auto":
        return {"half": "float16", "float": "float32"}.get(
            argument, argument
        ), "actors.sglang.arguments.dtype"
    stored = "" if model is None or a.sglang.way == "url" else model_shape(model).get("dtype", "")
    if not stored:
        return "", ""
    return (
        "bfloat16" if stored == "bfloat16" else "float16",
        f"SGLang's choice for weights stored in {stored}",
    )


def model_shape(model: Path) -> dict[str, Any]:
    """Return the settings of a model's folder, with the number type of its weights as "dtype"; {}
    if it is not on this disk yet."""
    settings = model / "config.json"
    shape = msgspec.json.decode(settings.read_bytes()) if settings.is_file() else {}
    return {"dtype": shape["torch_dtype"]} | shape if "torch_dtype" in shape else shape
