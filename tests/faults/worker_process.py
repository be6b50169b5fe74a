"""A worker of its own process that says on stdout what it does: python -m
tests.faults.worker_process ENDPOINT KEYS NAME.

The requested token says what the request does: 0 answers, 1 works until its gate file exists, 2
ends the process at once.
"""

import asyncio
import os
import sys
from pathlib import Path

from coppice.common import loop
from coppice.wire.keys import PeerKeys
from coppice.wire.service import Call, Service
from tests.services import EchoRequest, EchoResult


async def serve(endpoint: str, keys: Path, name: str) -> None:
    gate = keys / f"{name}.gate"

    async def echo(request: EchoRequest, call: Call) -> EchoResult:
        print(f"got {int(request.tokens[0])}", flush=True)
        match int(request.tokens[0]):
            case 1:
                while not gate.exists():  # another process opens it
                    await asyncio.sleep(0.01)
            case 2:
                os._exit(3)
        return EchoResult(request.tokens, os.getpid())

    await Service(name, {"echo": echo}, 4, give_up_s=1.0, silence_s=0.5).run(
        endpoint, PeerKeys.load(keys, "tests")
    )


if __name__ == "__main__":
    loop.run(serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
