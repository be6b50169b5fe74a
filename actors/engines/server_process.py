"""A server of SGLang or vLLM as a child process: ``python server_process.py sglang <
ARGUMENTS.json``.

The arguments come through standard input, so that no process list shows the API key. The process
runs under the interpreter that has the package, which need not have Coppice or its packages. This
module therefore imports only the standard library.
"""

import asyncio
import ctypes
import hmac
import json
import os
import signal
import sys
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_key = ""


class Guard:
    """Refuses every request but one for vLLM's /health without the key, because vLLM's own check
    leaves out the calls that change weights."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers") or ()).get(b"authorization", b"")
        proven = hmac.compare_digest(given, f"Bearer {_key}".encode())
        if scope["type"] == "http" and scope["path"] != "/health" and not proven:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the API key is missing or wrong"})
            return
        await self.app(scope, receive, send)


def main(package: str) -> None:
    """Serve until killed, or until the actor that started this process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:  # the actor was gone before that call
        sys.exit("the actor that started this server is gone")
    arguments = json.load(sys.stdin)
    here = os.path.dirname(os.path.realpath(__file__))
    # sglang.py and vllm.py in this folder are not the packages
    sys.path = [path for path in sys.path if os.path.realpath(path) != here]
    try:
        {"sglang": _sglang, "vllm": _vllm}[package](arguments)
    except ImportError as error:
        sys.exit(
            f"{sys.executable} cannot import {package} ({error}): install it there, or name"
            f" another interpreter in actors.{package}.python"
        )


def _refuse(package: str, error: object, expected: str) -> NoReturn:
    sys.exit(f"actors.{package}.arguments: {error}; expected {expected}")


def _sglang(arguments: dict[str, Any]) -> None:
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    load_plugins()
    try:
        settings = ServerArgs(**arguments)
    except TypeError as error:
        _refuse("sglang", error, "fields of sglang's ServerArgs")
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _vllm(arguments: dict[str, Any]) -> None:
    global _key
    from vllm.entrypoints.launchers.api_server.entry import run_server  # pyright: ignore
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # pyright: ignore
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore

    _key = arguments["api_key"][0]
    parser = make_arg_parser(FlexibleArgumentParser())
    if unknown := arguments.keys() - vars(parser.parse_args([])).keys():
        _refuse("vllm", sorted(unknown), "names of arguments of vllm serve")
    # the parser reads texts, not tables
    texts = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in arguments.items()}
    parser.set_defaults(**texts, middleware=["__main__.Guard"])
    settings = parser.parse_args([])
    validate_parsed_serve_args(settings)
    asyncio.run(run_server(settings))


if __name__ == "__main__":
    main(sys.argv[1])
