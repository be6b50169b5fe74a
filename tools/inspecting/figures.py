"""Saves figures as files."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as an SVG file whose bytes are the same each time."""
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight", facecolor="white")
