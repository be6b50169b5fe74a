"""The command coppice serve --model: the embedded engine serves a model over the OpenAI-compatible
protocol."""

import argparse
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from coppice.actors.config import ActorsConfig
from coppice.common import loop
from coppice.common.hardware import cores
from coppice.common.numbers import Count, Positive
from coppice.common.options import command_parser, gave_up
from coppice.common.process import begin
from coppice.tools.defaults.models import DEFAULT, ensure_model
from coppice.tools.defaults.settings import cache_folder
from coppice.tools.launching.settings import JUDGE_HOST, JudgeModelProcess
from coppice.wire.faults import InfrastructureFault
from coppice.wire.sockets import is_loopback

_CONTEXT = 4096
_PORT = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
_CACHE_GIB = 2.0
"""Larger than an actor's cache: running samples and the prefixes that clients share must fit
together, or prefixes are computed again."""
NUMBERS = ("threads", "max_context", "max_batch", "kv_cache_gib")
"""Options that are settings of the engine."""
_PATIENCE_S = 2.0
"""Seconds that open requests have to end when the server stops."""


async def serve(options: argparse.Namespace, folder: Path, api_key: str) -> None:
    """Serve until cancelled.

    Raises OSError if the address cannot be taken, InfrastructureFault when the engine has died, and
    whatever the engine's start raises.
    """
    # here, because what follows imports torch, for which --help should not wait
    from aiohttp import web

    from coppice.actors.engines.local import LocalEngine
    from coppice.actors.serving.server import Server

    limits = ActorsConfig(**{name: getattr(options, name) for name in NUMBERS})
    engine = LocalEngine(str(folder), limits)
    await engine.start()
    server = Server(engine, folder, name=options.name, api_key=api_key)
    # when a client hangs up, its samples are aborted
    served = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await served.setup()
    try:
        await web.TCPSite(served, options.host, options.port, shutdown_timeout=_PATIENCE_S).start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"serving {server.name} at http://{host}:{served.addresses[0][1]}/v1", flush=True)
        raise InfrastructureFault(await engine.died())
    finally:
        await served.cleanup()
        await engine.close()


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        variable = options.api_key_env
        api_key = os.environ.get(variable, "").strip()
        if variable and not api_key:
            empty = "that variable is empty; set it to the API key"
            raise ValueError(f"--api-key-env {variable}: {empty}")
        # a name other than localhost may mean any machine
        if not is_loopback(f"tcp://{options.host}:0") and not api_key:
            raise ValueError(
                f"--host {options.host} can be reached from other machines: name the variable that"
                " holds an API key (--api-key-env), or use 127.0.0.1"
            )
        from transformers.utils import logging  # it imports torch

        logging.disable_progress_bar()
        folder = ensure_model(options.model, cache_folder())
        loop.run(loop.until_signal(serve(options, folder, api_key)))
    except (ValueError, OSError, MemoryError) as error:
        return gave_up("coppice serve --model", error, 1)
    except InfrastructureFault as fault:
        told = f"{fault}; its traceback is above. Start the server again"
        return gave_up("coppice serve --model", told, 1)
    return 0


EXAMPLES = """\
  coppice serve --model FOLDER                      at http://127.0.0.1:30000/v1
  coppice serve --model FOLDER --port 0 --threads 2   any free port, two threads
  coppice serve --model FOLDER --host 0.0.0.0 --api-key-env MY_KEY"""


def parser() -> argparse.ArgumentParser:
    what = "Serve a model over the OpenAI-compatible protocol (docs/serve-model.md)."
    parser = command_parser("coppice serve --model", what, EXAMPLES)
    add, default = parser.add_argument, "(default: %(default)s)"
    model = f"a folder, a hub id or a built-in name (default: {DEFAULT})"
    add("model", nargs="?", default=DEFAULT, metavar="MODEL", help=model)
    host = f"address to listen at; one of the network needs --api-key-env {default}"
    add("--host", default="127.0.0.1", help=host)
    add("--port", type=_PORT, default=30000, help=f"0 takes a free one {default}")
    add("--name", default="", help="what clients call the model (default: the folder's name)")
    key = "variable that holds the key clients must send"
    add("--api-key-env", default="", metavar="NAME", help=key)
    threads = "compute threads (default: all cores)"
    add("--threads", type=Count, default=cores(), help=threads)
    context = f"tokens of a prompt and its answer together, at most {default}"
    add("--max-context", type=Count, default=_CONTEXT, help=context)
    batch = f"samples that decode together {default}"
    add("--max-batch", type=Count, default=ActorsConfig().max_batch, help=batch)
    cache = f"GiB of keys and values, running and cached {default}"
    add("--kv-cache-gib", type=Positive, default=_CACHE_GIB, help=cache)
    return parser


def in_a_run() -> None:
    """Serve [judges.model] of a run to its judges. If the engine dies, exit with status 1, so that
    the launcher starts the process again."""
    begin()
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JudgeModelProcess)
    engine = msgspec.structs.asdict(process.model)
    options = argparse.Namespace(host=JUDGE_HOST, port=process.port, **engine)
    try:
        loop.run(loop.until_signal(serve(options, Path(process.folder), "")))
    except InfrastructureFault as fault:
        sys.exit(f"{process.name}: {fault}")


if __name__ == "__main__":
    in_a_run()
