"""The process of a run that serves [judges.model] to the run's own judges: tools/serve-model on the loopback, by a process file."""

import argparse
import sys
from pathlib import Path

import msgspec

from judges.config import JudgeModelConfig
from wire import loop
from wire.faults import InfrastructureFault

HOST = "127.0.0.1"


class JudgeModelProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A judge model process. folder: the model's Hugging Face folder."""

    name: str
    run: str
    folder: str
    port: int
    model: JudgeModelConfig

    @property
    def url(self) -> str:
        """What judges ask."""
        return f"http://{HOST}:{self.port}/v1"


def main() -> None:
    """Serve until SIGTERM; ends with status 1 when the engine has died, and the launcher starts it again."""
    from tools.launching.serve_model import (
        serve,
    )  # it imports torch, which the launcher, who writes the process file, does without

    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JudgeModelProcess)
    options = argparse.Namespace(host=HOST, port=process.port, **msgspec.structs.asdict(process.model))
    try:
        loop.run(serve(options, Path(process.folder), ""))
    except InfrastructureFault as fault:
        sys.exit(f"{process.name}: {fault}")


if __name__ == "__main__":
    main()
