"""docs/metrics.md declares every metric of a record, and nothing that no code writes."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from coppice.scheduler.telemetry.exporter import declaration, declared, exported

ROOT = Path(__file__).parent.parent.parent
METRICS = declared()
ROOMS = {name.partition("/")[0] for name in METRICS} - {"version", "health"}
DASHBOARD = json.loads((ROOT / "configs" / "grafana.json").read_text())


def written_names() -> set[str]:
    """The texts in the code of the rooms that look like a metric, with a star for what is filled
    in."""
    names: set[str] = set()
    for path in [*(ROOT / "scheduler").rglob("*.py"), *(ROOT / "learner").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                constants = (isinstance(part, ast.Constant) and part.value for part in node.values)
                names.add("".join(str(part or "*") for part in constants))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    metric = re.compile(rf"({'|'.join(sorted(ROOMS))})/[a-z0-9_*/]+")
    return {name for name in names if metric.fullmatch(name)}


@pytest.mark.second
def test_every_metric_that_the_code_writes_is_in_the_table() -> None:
    # the parts of these are listed below
    names = written_names() - {"count/*", "watch/*_*", "watch/*_*/*"}
    assert len(names) > 70, "the names were not found"
    assert sorted(name for name in names if declaration(name) is None) == []


def test_no_row_of_the_table_is_of_nothing() -> None:
    code = "".join(
        path.read_text()
        for room in ("actors", "scheduler", "learner")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "records.py"  # its rules name what others write
    )
    for name in METRICS:
        last = name.rpartition("/")[2].rpartition("*")[0 if name.endswith("*") else 2].strip("_*")
        assert last in code, f"{name} is written nowhere"


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_every_expression_of_the_dashboard_names_a_declared_metric(panel: dict[str, Any]) -> None:
    columns = "score/reward", "heldout/em", "heldout/success", "heldout/return"
    names = {exported(name) for name in (*METRICS, *columns)}
    expressions = " ".join(target["expr"] for target in panel["targets"])
    used = re.findall(r"coppice_\w+", expressions)
    assert used
    assert set(used) <= names
