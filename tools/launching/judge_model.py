"""The process that serves [judges.model] to a run's own judges: coppice serve --model on the
loopback."""

import argparse
import sys
from pathlib import Path

import msgspec

from coppice.common import loop
from coppice.common.process import begin
from coppice.judges.config import JudgeModelConfig
from coppice.wire.faults import InfrastructureFault

HOST = "127.0.0.1"


class JudgeModelProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process file of a judge model. folder: the model's Hugging Face folder."""

    name: str
    run: str
    folder: str
    port: int
    model: JudgeModelConfig

    @property
    def url(self) -> str:
        """The address to which the judges send their requests."""
        return f"http://{HOST}:{self.port}/v1"


def main() -> None:
    """Serve until SIGTERM. If the engine dies, exit with status 1, so that the launcher starts the
    process again."""
    # it imports torch, which the launcher must not, though it imports this module
    from coppice.tools.launching.serve_model import serve

    begin()
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JudgeModelProcess)
    options = argparse.Namespace(
        host=HOST, port=process.port, **msgspec.structs.asdict(process.model)
    )
    try:
        loop.run(serve(options, Path(process.folder), ""))
    except InfrastructureFault as fault:
        sys.exit(f"{process.name}: {fault}")


if __name__ == "__main__":
    main()
