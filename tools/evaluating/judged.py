"""Journaled turns as the judges of a run receive them: the run's environment reads the actions
again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.base import Environment, Task
from coppice.actors.environments.task_files import load_tasks
from coppice.scheduler.growth.tasks import GeneratedTasks
from coppice.scheduler.growth.tree import Node, Tree, turns_of
from coppice.scheduler.ledger.journal import TreeRow
from coppice.wire.messages import JudgedTurn


class _Scheduler(msgspec.Struct, frozen=True):
    budget: int = 3


class PlayedRun(msgspec.Struct, frozen=True):
    """The fields of RUN/processes/scheduler.json that say what a run plays, also one of an earlier
    release."""

    environment: str
    train: str | list[str]
    heldout: str | list[str]
    seed: int = 0
    options: dict[str, Any] = {}
    scheduler: _Scheduler = _Scheduler()


def process(folder: Path) -> PlayedRun:
    """Return what a run plays. Raises FileNotFoundError or ValueError if this is no run."""
    path = folder / "processes" / "scheduler.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no processes/scheduler.json: expected the folder of a run"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=PlayedRun)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; expected what coppice launch wrote") from None


def turns(folder: Path, row: TreeRow, tree: Tree) -> list[tuple[Node, JudgedTurn]]:
    """Return every action of a tree with what a judge sees of it. Raises FileNotFoundError or
    ValueError if the run or its task is not there."""
    of = process(folder)
    environment = registry.load(of.environment, of.options)
    task = next((task for task in _tasks(of, environment, row) if task.id == row.task), None)
    if task is None:
        raise ValueError(f"tree {row.id}: its task {row.task!r} is not among the run's tasks")
    actions = [node for node in tree.nodes.values() if node.kind == "action"]
    return [(node, turn(environment, tree, node, task, of.scheduler.budget)) for node in actions]


def _tasks(of: PlayedRun, environment: Environment, row: TreeRow) -> Iterator[Task]:
    if registry.makes_tasks(environment):
        makes: Any = environment
        generated = GeneratedTasks(makes.task, of.seed)
        train = row.split == "train"
        yield from [generated.at(row.position)] if train else generated.held_out(row.position + 1)
    else:
        source = of.train if row.split == "train" else of.heldout
        yield from load_tasks(source, environment.verbatim)[0]


def turn(environment: Environment, tree: Tree, node: Node, task: Task, budget: int) -> JudgedTurn:
    """Return an action as the run's own judge receives it (``scheduler.context``)."""
    state = msgspec.convert(tree.state_before(node), type(environment.initial(task)))
    seen = environment.judged(task, state, environment.read(state, node.text), node.step, budget)
    if environment.fresh:
        return seen
    seen = environment.recalled(seen, state, turns_of(tree.path(node)))
    answers = [child.text for child in tree.children(node) if child.kind == "observation"]
    transcript = "".join(above.text for above in tree.path(node)[1:-1])
    return msgspec.structs.replace(
        seen, transcript=transcript, observation=answers[0] if answers else None
    )
