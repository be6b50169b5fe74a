"""A run of two schedulers that are killed: ``python -m tests.faults.two_schedulers FOLDER``.

Both are paused for a moment. The second one is killed twice, which must leave everything else as it
was, then the first one, which resumes the whole run, then everything at once. At last the run is
stopped as by Ctrl-C, and resumed to its end. FOLDER/lived.json says what was seen.
"""

import json
import signal
import sys
import urllib.request
from pathlib import Path

from coppice.common import shards
from coppice.research.chaos import world
from coppice.research.chaos.run import Run
from coppice.scheduler.telemetry import health
from coppice.tools.launching import control

SETTINGS = (
    "scheduler.shards=2", "scheduler.questions_per_update=4", "learner.count=1", "actors.count=2", "scheduler.prometheus=127.0.0.1:0",
)  # fmt: skip
OTHERS = ("scheduler", "learner-0", "actor-0", "actor-1", "judges-1", "retriever-1")


def moved(run: Run, updates: int) -> None:
    """Wait until so many more updates have been made."""
    mark = run.version() + updates
    run.wait(lambda: run.version() >= mark, f"version {mark}", 60.0)


def paused(run: Run, wanted: bool) -> None:
    """Wait until both schedulers say that they are paused, or that they are not."""
    homes = [shards.folder(run.folder, number) for number in range(2)]
    run.wait(
        lambda: all((r := health.read(home)) is not None and r.paused == wanted for home in homes),
        "pause",
        20.0,
    )


def scraped(run: Run, *samples: str) -> None:
    """Wait until Prometheus gets these samples."""
    url = (run.folder / "prometheus").read_text()
    run.wait(
        lambda: set(urllib.request.urlopen(url).read().decode().splitlines()) >= {*samples},
        f"{samples}",
        60.0,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    config, run = world.make(folder), Run(folder, folder / "run")
    changes = [word for setting in SETTINGS for word in ("--set", setting)]
    try:
        run.launch("--config", str(config), "--run-folder", str(run.folder), *changes)
        moved(run, 2)
        control.pause(run.folder)
        paused(run, True)
        control.resume(run.folder)
        paused(run, False)
        before = run.pids()
        for _ in range(2):
            run.signal("scheduler-1", signal.SIGKILL)
            moved(run, 3)
        after = run.pids()
        run.signal("scheduler", signal.SIGKILL)
        moved(run, 2)
        run.kill_all()
        said = run.out.read_text()
        run.resume()
        moved(run, 2)
        scraped(
            run,
            'coppice_busy_engines{run="run"} 2.0',
            'coppice_health_workers{run="run",service="generate"} 2.0',
        )
        seen = {
            "untouched": [name for name in OTHERS if before[name] == after[name]],
            "replaced": before["scheduler-1"] != after["scheduler-1"],
            "status": run.finish(),
            "said": said,
        }
    finally:
        run.close()
    (folder / "lived.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
