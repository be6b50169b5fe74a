"""The command coppice export: it writes the policy of a run as a Hugging Face folder that
transformers and SGLang load."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from coppice.common import vision
from coppice.common.atomic import drafted
from coppice.common.options import command_parser, gave_up
from coppice.tools.evaluating import versions
from coppice.tools.inspecting import replay
from coppice.wire.faults import InfrastructureFault

FILES = "*token* *.jinja vocab* merges* special* generation_config.json preprocessor_config.json"
"""The other files of the model folder that belong to the policy: tokenizer, chat template,
generation settings, image processor."""


def export(
    run: Path, folder: Path, version: int | str | None = None, dtype: str = "float32"
) -> int:
    """Write a policy version of ``run`` (a number, "best" on the held-out tasks, or None for the
    newest) and return its number.

    The folder appears whole or not at all. Raises ValueError if ``run`` is not a run or has no such
    version (the message names the others), InfrastructureFault if the weights fail their digest,
    OSError if ``folder`` is not empty or the disk cannot take them.
    """
    import torch  # here, because --help should not wait for it

    base = replay.learner(run).model
    number, weights_folder = versions.chosen(run, version)
    with drafted(folder, "--out") as draft:
        model: Any = vision.load(base, torch.float32, "sdpa")
        if weights_folder is not None:
            replay.apply_version(model, base, weights_folder)
        try:
            model.to(getattr(torch, dtype)).save_pretrained(draft)
            for path in (path for pattern in FILES.split() for path in Path(base).glob(pattern)):
                shutil.copy(path, draft / path.name)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"the policy could not be written to {folder}: {error}; free some space"
            ) from None
    return number


def parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "coppice export",
        "Write the policy of a run as a Hugging Face folder.",
        "  coppice export RUN --out FOLDER                     the newest weights\n"
        "  coppice export RUN --out FOLDER --version best      the best on held-out tasks\n"
        "  coppice export RUN --out FOLDER --dtype bfloat16    half the size",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    out = "folder to write, new or empty"
    add("--out", type=Path, required=True, metavar="FOLDER", help=out)
    version = "policy version, a number or best (default: the newest)"
    add("--version", type=versions.argument, metavar="VERSION", help=version)
    dtypes, words = ["float32", "bfloat16", "float16"], "number type (default: %(default)s)"
    add("--dtype", choices=dtypes, default="float32", help=words)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        version = export(options.run, options.out, options.version, options.dtype)
    except (OSError, ValueError, InfrastructureFault) as error:
        return gave_up("coppice export", error)
    print(f"policy version {version} is in {options.out}")
    return 0
