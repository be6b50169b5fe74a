"""Draws curves with intervals, and saves figures as files or as parts of a page. Equal figures have
equal bytes."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coppice.tools.inspecting.runs import Curve

INK = "#1b1c1d"
"""The colour of texts and axes; on a page it becomes the colour of the page's text, so that figures
suit a light and a dark one."""
_COLOURS = ("#3b82c4", "#d9752b", "#3a9d5d", "#c4507a", "#8a6fd1", "#a08a20", "#3fa0a8", "#808080")
"""Lines: of middle brightness, so that they can be seen on white and on black."""
_STYLES = ("-", "--", "-.", ":")
"""Together with the colours they tell the lines apart without colours too."""
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "coppice", "svg.fonttype": "none", "path.simplify_threshold": 0.5, "text.parse_math": False,
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip
_NAMELESS = {"Date": None, "Creator": None}
POINTS = 30
"""A line of at most so many points shows each."""
SMOOTHED = 4
"""A panel of at most so many long lines without intervals also draws their running means."""


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as a PNG or SVG file, as the suffix of ``path`` says."""
    svg = path.suffix.lower() != ".png"
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(
            path, format="svg" if svg else "png", metadata={"Date": None} if svg else {"Software": None}, dpi=144,
            bbox_inches="tight", facecolor="white",
        )  # fmt: skip


def inline(figure: Figure, label: str) -> str:
    """Return ``figure`` as an element for a page, with a transparent ground; ``label`` is what a
    screen reader says."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata=_NAMELESS, transparent=True)
    text = buffer.getvalue()
    element = text[text.index("<svg") :].replace(INK, "currentColor")
    # they would not be unique on a page of several figures
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def panels(
    drawn: Mapping[str, Mapping[str, Curve]],
    x_label: str,
    limits: Mapping[str, float] = {},
    columns: int = 2,
) -> Figure:
    """Draw one panel per title, each with its curves by name. limits: titles with a value at which
    a dashed line stands."""
    columns = min(columns, len(drawn))
    rows = -(-len(drawn) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.4 * columns, 2.7 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (title, curves) in zip(axes, drawn.items(), strict=False):
            _panel(axis, title, curves, x_label, limits.get(title))
        for axis in axes[len(drawn) :]:
            axis.set_visible(False)
    return figure


def _panel(
    axis: Axes, title: str, curves: Mapping[str, Curve], x_label: str, limit: float | None
) -> None:
    for i, (name, curve) in enumerate(
        curves.items()
    ):  # a name has its colour in every panel, also where another has no points
        if not curve.x:
            continue
        few, colour = len(curve.x) <= POINTS, _COLOURS[i % len(_COLOURS)]
        style = _STYLES[(i + i // len(_COLOURS)) % len(_STYLES)]
        known = [
            (x, y - half, y + half)
            for x, y, half in zip(curve.x, curve.y, curve.half, strict=True)
            if half == half
        ]
        bold = few or known or len(curves) > SMOOTHED
        axis.plot(
            curve.x, curve.y, marker="." if few else "", linewidth=1.3 if bold else 0.8, alpha=1 if bold else 0.45,
            color=colour, linestyle=style if bold else "-", label=name if bold else None,
        )  # fmt: skip
        if not bold:
            axis.plot(
                curve.x, smooth(curve.y), linewidth=1.8, color=colour, linestyle=style, label=name
            )
        elif known:
            x, low, high = zip(*known, strict=True)
            if few:
                axis.vlines(x, low, high, color=colour, linewidth=1.2)
            else:
                axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    if all(abs(y) < 1e-9 for curve in curves.values() for y in curve.y):  # rounding only
        axis.set_ylim(-1, 1)
    if limit:
        axis.axhline(limit, color=_COLOURS[3], linewidth=1, linestyle=(0, (2, 2)))
    axis.set_title(title, fontsize=9.5, loc="left")
    axis.set_xlabel(x_label)
    axis.grid(alpha=0.25)
    axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)
    if len(curves) > 1:
        axis.legend(fontsize=7.5, frameon=False)


def smooth(values: Sequence[float]) -> list[float]:
    """Return each value's mean with its neighbours: a twentieth of all values, half of them before
    it, fewer at the ends."""
    reach = len(values) // 40
    return [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def caption(curves: Mapping[str, Curve]) -> str:
    """Return in words how each curve goes: the means of its first and its last tenth."""
    parts = []
    for name, curve in ((name, curve) for name, curve in curves.items() if curve.y):
        tenth = max(1, len(curve.y) // 10)
        first, last = (round(fmean(part), 12) for part in (curve.y[:tenth], curve.y[-tenth:]))
        parts.append((f"{name}: " if len(curves) > 1 else "") + f"{first:.4g} → {last:.4g}")
    return "; ".join(parts)
