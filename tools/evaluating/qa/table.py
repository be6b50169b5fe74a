"""A table as in the papers: one row per method and model, one column per set, and the macro mean,
all with intervals."""

from coppice.scheduler.evaluation.evaluation import Estimate
from coppice.tools.evaluating.folder import Measured
from coppice.tools.evaluating.qa.evaluation import Result, RowResult
from coppice.tools.evaluating.qa.scoring import COUNTS


def markdown(result: Result, measure: str = "em") -> str:
    """The table of one measure as mean ± half width of the 95% interval, with a legend below."""
    sets = result.settings.sets
    several = any(row.multi_hop for row in result.rows)
    head = ["method", "model", *(f"{s.name} ({s.questions})" for s in sets), "mean"]
    head += ["multi-hop mean"] if several else []
    lines = [head, ["---"] * len(head)]
    for row in result.rows:
        cells = [_cell(row.sets[s.name].get(measure), measure) for s in sets] + [
            _cell(row.macro.get(measure), measure)
        ]
        cells += [_cell(row.multi_hop.get(measure), measure)] if several else []
        lines.append([row.settings.method, _model(row), *cells])
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join(
        [*rows, "", f"{measure}, mean ±95%; mean is over the sets' means (questions in brackets)."]
    )


def notes(result: Result) -> list[str]:
    """The costs of each row, the questions that could not be finished, and the rows of files that
    cannot be used."""
    notes = []
    for row in result.rows:
        notes.append(
            f"{row.name}: {row.seconds:.0f} s, {row.generated_tokens} generated tokens,"
            f" {row.queries} queries ({row.hits} from the cache)"
        )
        for task, reason in list(row.failed.items())[:2]:
            notes.append(f"  not finished, scored 0: {task}: {reason}")
        if len(row.failed) > 2:
            notes.append(
                f"  not finished, scored 0: {len(row.failed) - 2} more, see {row.name}/result.json"
            )
    for one in result.settings.sets:
        if one.rejected:
            reasons = ", ".join(f"{count} {reason}" for reason, count in one.reasons.items())
            notes.append(f"{one.name}: {one.rejected} rows of its file cannot be used: {reasons}")
    return notes


def _model(row: RowResult) -> str:
    how = "" if row.settings.temperature == 0 else f", temperature {row.settings.temperature:g}"
    return row.name.removeprefix(f"{row.settings.method}.") + how


def _cell(value: Measured | Estimate | None, measure: str) -> str:
    if value is None:
        return "-"
    digits = 1 if measure in COUNTS else 3
    return f"{value.mean:.{digits}f} ±{value.half:.{digits}f}"
