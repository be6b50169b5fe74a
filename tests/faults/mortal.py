"""A process of a run that does as it is told: ``python -m tests.faults.mortal
RUN/processes/NAME.json``.

The file holds a list of acts, lists of words; each start does the next one. A word that is none of
those below is the message of what ends it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from coppice.common import shards


class PackingError(RuntimeError):
    """Stands for any error that repeats."""


def main() -> None:
    file = Path(sys.argv[1])
    run, starts = file.parent.parent, file.with_suffix(".starts")
    count = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (count + 1))
    acts = json.loads(file.read_text())
    for word in acts[min(count, len(acts) - 1)]:
        match word:
            case "checkpoint":
                folder = run / "checkpoints" / f"v{count + 1:06d}"
                folder.mkdir(parents=True)
                (folder / "state.json").touch()
            case "ready":
                _, _, number = file.stem.partition("scheduler-")
                home = shards.folder(run, int(number or 0))
                home.mkdir(parents=True, exist_ok=True)
                (home / "endpoint").touch()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "deaf":
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
            case "checkpoint at the end":

                def save(*_: object) -> None:
                    time.sleep(1)
                    (run / "saved").touch()
                    sys.exit(0)

                signal.signal(signal.SIGTERM, save)
            case "leave":
                sys.exit(0)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "wait":
                time.sleep(2)
            case "stay":
                time.sleep(600)
            case message:
                raise PackingError(message)


if __name__ == "__main__":
    main()
