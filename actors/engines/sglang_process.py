"""The SGLang server as a child process: ``python sglang_process.py < ARGUMENTS.json``.

The arguments come through standard input, so that no process list shows the API key. The process
runs under the interpreter that has sglang, which need not have Coppice or its packages. This module
therefore imports only the standard library.
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until killed, or until the actor that started this process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:  # the actor was gone before that call
        sys.exit("the actor that started this server is gone")
    arguments = json.load(sys.stdin)
    here = os.path.dirname(os.path.realpath(__file__))
    # sglang.py in this folder is not the package
    sys.path = [path for path in sys.path if os.path.realpath(path) != here]
    try:
        from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
        from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]
        from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]
        from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        sys.exit(
            f"{sys.executable} cannot import sglang ({error}): install the sglang extra there, or"
            " name another interpreter in actors.sglang.python"
        )
    load_plugins()
    try:
        settings = ServerArgs(**arguments)
    except TypeError as error:
        sys.exit(f"actors.sglang.arguments: {error}; expected fields of sglang's ServerArgs")
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
