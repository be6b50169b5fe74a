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
import numpy as np
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
    "svg.hashsalt": "coppice",
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.5,
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
} | {f"{of}.color": INK for of in ("text", "xtick", "ytick")}
POINTS = 30
"""A line of at most this many points shows each."""
SMOOTHED = 4
"""A panel of at most this many long lines without intervals also draws their running means."""


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as a PNG or SVG file, as the suffix of ``path`` says."""
    metadata = {"Software": None} if path.suffix.lower() == ".png" else {"Date": None}
    kind = "png" if "Software" in metadata else "svg"
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        size: dict[str, Any] = {"dpi": 144, "bbox_inches": "tight", "facecolor": "white"}
        figure.savefig(path, format=kind, metadata=metadata, **size)


def inline(figure: Figure, label: str) -> str:
    """Return ``figure`` as an element for a page, with a transparent ground; ``label`` is what a
    screen reader says."""
    buffer, nameless = io.StringIO(), {"Date": None, "Creator": None}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata=nameless, transparent=True)
    text = buffer.getvalue()
    element = text[text.index("<svg") :].replace(INK, "currentColor")
    # they would not be unique on a page of several figures
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def panels(drawn: Mapping[str, Mapping[str, Curve]], x_label: str) -> Figure:
    """Draw one panel per title, each with its curves by name."""
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.4 * columns, 2.7 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (title, curves) in zip(axes, drawn.items(), strict=False):
            for place, (name, curve) in enumerate(curves.items()):
                # a name has its colour in every panel, also where another has no points
                if curve.x:
                    _line(axis, place, name, curve, len(curves) <= SMOOTHED)
            values = [y for curve in curves.values() for y in curve.y] or [0.0]
            low, high = axis.get_ylim() if max(map(abs, values)) > 1e-9 else (0, 1)  # of rounding
            # margins and intervals end where values can: a share at 0 and 1
            low = max(low, 0.0) if min(values) >= 0 else low
            axis.set_ylim(low, min(high, 1.0) if max(values) <= 1 else high)
            axis.set_title(title, fontsize=9.5, loc="left")
            axis.set_xlabel(x_label)
            axis.grid(alpha=0.25)
            axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)
            if len(curves) > 1:
                axis.legend(fontsize=7.5, frameon=False)
        for axis in axes[len(drawn) :]:
            axis.set_visible(False)
    return figure


def _line(axis: Axes, place: int, name: str, curve: Curve, smoothed: bool) -> None:
    few, colour = len(curve.x) <= POINTS, _COLOURS[place % len(_COLOURS)]
    style = _STYLES[(place + place // len(_COLOURS)) % len(_STYLES)]
    points = zip(curve.x, curve.y, curve.half, strict=True)
    spans = [(x, y - half, y + half) for x, y, half in points if half == half]
    bold: dict[str, Any] = {"color": colour, "linestyle": style, "label": name}
    if few or spans or not smoothed:
        axis.plot(curve.x, curve.y, marker="." if few else "", linewidth=1.3, **bold)
    else:
        axis.plot(curve.x, curve.y, linewidth=0.8, alpha=0.45, color=colour)
        axis.plot(curve.x, smooth(curve.y), linewidth=1.8, **bold)
    if spans:
        x, low, high = zip(*spans, strict=True)
        if few:
            axis.vlines(x, low, high, color=colour, linewidth=1.2)
        else:
            axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def smooth(values: Sequence[float]) -> list[float]:
    """Return each value's mean with its neighbours: a twentieth of all values, half of them before
    it, fewer at the ends."""
    window = np.ones(2 * (len(values) // 40) + 1)
    sums, counts = (np.convolve(of, window, "same") for of in (values, np.ones(len(values))))
    return (sums / counts).tolist()


def caption(curves: Mapping[str, Curve]) -> str:
    """Return in words how each curve goes: the means of its first and its last tenth."""
    parts = []
    for name, curve in ((name, curve) for name, curve in curves.items() if curve.y):
        tenth = max(1, len(curve.y) // 10)
        first, last = (round(fmean(part), 12) for part in (curve.y[:tenth], curve.y[-tenth:]))
        parts.append((f"{name}: " if len(curves) > 1 else "") + f"{first:.4g} → {last:.4g}")
    return "; ".join(parts)
