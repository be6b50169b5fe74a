"""A terminal for tests: a command runs on a pseudo-terminal of a real size, and what a user sees is
worked out from the codes that it wrote."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence

_TOKEN = re.compile(r"\x1b\[[\d;]*[A-Za-z]|[\r\n]|[^\r\n\x1b]")


def output(command: Sequence[str], lines: int, columns: int, **environment: str) -> str:
    """Run ``command`` on a terminal of this size and return all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    own = ("COLUMNS", "LINES", "NO_COLOR")
    shell = {key: value for key, value in os.environ.items() if key not in own}
    shell |= {"TERM": "xterm"} | environment
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=shell)
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


def seen(written: str, lines: int, columns: int) -> list[str]:
    """What the terminal and its scroll-back hold, from the codes for up, down, clear to the end of
    the line, and colours."""
    rows, row, column = [""], 0, 0
    for token in _TOKEN.findall(written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        elif token[0] == "\x1b":
            number = int(token[2:-1]) if token[-1] in "AB" else 0
            if token[-1] == "A":
                row = max(0, len(rows) - lines, row - number)
            elif token[-1] == "B":
                row = min(len(rows) - 1, row + number)
            elif token[-1] == "K":
                rows[row] = rows[row][:column]
            else:
                assert token[-1] == "m", f"an unknown code: {token!r}"
        else:
            if column == columns:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row].ljust(column)[:column] + token + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    return rows
