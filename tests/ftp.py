"""An FTP server of this process on the loopback: a storage that fsspec reaches over a network, with
a user and a password."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer

USER, PASSWORD = "coppice", "secret"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve ``folder``, and yield the URL, which names neither user nor password."""
    authorizer = DummyAuthorizer()
    authorizer.add_user(USER, PASSWORD, str(folder), perm="elradfmw")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    server = FTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"timeout": 0.1, "handle_exit": False}, daemon=True
    )
    thread.start()
    try:
        yield f"ftp://127.0.0.1:{server.address[1]}"
    finally:
        server.close_all()
