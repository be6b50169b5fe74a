"""A process that tells what it is, and then lives until it is killed."""

import json
import os
import sys
import time

import psutil


def main() -> None:
    server = psutil.Process().parent()
    assert server is not None
    told = {
        "words": psutil.Process().cmdline(),
        "argv": sys.argv,
        "environment": dict(os.environ),
        "session": os.getsid(0) == os.getpid() != os.getsid(server.pid) == server.pid,
        "torch": "torch" in sys.modules and sys.modules["torch"].get_num_threads(),
        "server": [server.pid, server.num_threads(), server.environ()],
    }
    # in one piece, and first: whoever has read the line may kill
    os.write(2, b"to the log\n")
    print(json.dumps(told), flush=True)
    if sys.argv[1].endswith("ends"):
        sys.exit(7)
    time.sleep(600)
