"""Journaled turns as the judges of a run receive them: the run's environment reads the actions
again."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coppice.actors.environments.base import Environment, Task
from coppice.common.jsonl import MALFORMED
from coppice.scheduler.growth.tree import Node, Tree, turns_of
from coppice.wire.messages import JudgedTurn

Saved = TypeVar("Saved")


class PlayedRun(msgspec.Struct, frozen=True):
    """The fields of RUN/processes/scheduler.json that say what a run plays, also one of an earlier
    release."""

    environment: str
    train: str | list[str]
    heldout: str | list[str]
    seed: int = 0
    options: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}


def saved(path: Path, kind: type[Saved]) -> Saved:
    """Return a file of a run's folder. Raises ValueError if it is missing, torn or of another
    form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        missing = f"{path.parents[1]} has no {path.parent.name}/{path.name}"
        raise ValueError(f"{missing}: expected the folder of a run") from None
    except (OSError, *MALFORMED) as error:
        raise ValueError(f"{path}: {error}; expected what this release wrote") from None


def process(folder: Path) -> PlayedRun:
    """Return what a run plays. Raises ValueError if this is no run."""
    return saved(folder / "processes" / "scheduler.json", PlayedRun)


def turn(environment: Environment, tree: Tree, node: Node, task: Task, budget: int) -> JudgedTurn:
    """Return an action as the run's own judge receives it (``scheduler.context``)."""
    state = msgspec.convert(tree.state_before(node), type(environment.initial(task)))
    seen = environment.judged(task, state, environment.read(state, node.text), node.step, budget)
    if environment.fresh:
        return seen
    seen = environment.recalled(seen, state, turns_of(tree.path(node)))
    answers = (child.text for child in tree.children(node) if child.kind == "observation")
    transcript = "".join(above.text for above in tree.path(node)[1:-1])
    return msgspec.structs.replace(seen, transcript=transcript, observation=next(answers, None))
