"""The command coppice dev theory measures, from the definitions, the claims of four papers on
process rewards and the bias of corrections.

Each paper is a module here whose ``rows(seed)`` are claims. A row states what was measured to be
true, even where the paper prints something else; docs/theory.md has both.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from coppice.common.options import command_parser
from coppice.tools.evaluating import examination

PAPERS = ("slate", "ppr", "vpr", "oprl", "staleness")
BATCHES = 40  # enough to know the spread of the batch means to one ninth of its value
# with 40 batches, a correct value deviates by more than this less than once in 10,000 times
STANDARD_ERRORS = 4.5
STEP = 1e-5  # step of the central differences, with truncation and rounding errors both near 1e-11


class ClaimRow(msgspec.Struct, frozen=True):
    """One claim with the measured value, the expected value, and whether both agree within the
    sampling or rounding error."""

    claim: str
    measured: str
    expected: str
    agrees: bool


class BatchEstimate(msgspec.Struct, frozen=True):
    """A mean over independent batches and its standard error, [...] each."""

    value: NDArray[np.float64]
    error: NDArray[np.float64]

    def near(self, expected: ArrayLike) -> bool:
        """True if every entry is within STANDARD_ERRORS standard errors of ``expected``."""
        limit = STANDARD_ERRORS * self.error + 1e-12
        return bool(np.all(np.abs(self.value - np.asarray(expected)) <= limit))

    def at(self, index: int) -> "BatchEstimate":
        """Return one entry of the first axis."""
        return BatchEstimate(self.value[index], self.error[index])

    def __str__(self) -> str:
        return f"{show(self.value)} (se {np.max(self.error):.4f})"


def estimate(
    statistic: Callable[[np.random.Generator], ArrayLike], rng: np.random.Generator
) -> BatchEstimate:
    """Return the mean and standard error of ``statistic`` over BATCHES independent batches, which
    it draws from ``rng``."""
    values = np.array([statistic(rng) for _ in range(BATCHES)], dtype=np.float64)
    return BatchEstimate(values.mean(axis=0), values.std(axis=0, ddof=1) / BATCHES**0.5)


def stacked(estimates: Iterable[BatchEstimate]) -> BatchEstimate:
    """Stack several estimates into one along a new first axis."""
    collected = list(estimates)
    return BatchEstimate(
        np.stack([one.value for one in collected]), np.stack([one.error for one in collected])
    )


def differences(
    objective: Callable[[NDArray[np.float64]], float], place: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the gradient of ``objective`` at ``place`` by central differences, in the shape of
    ``place``."""
    gradient = np.empty_like(place)
    for index in np.ndindex(*place.shape):
        shift = np.zeros_like(place)
        shift[index] = STEP
        gradient[index] = (objective(place + shift) - objective(place - shift)) / (2 * STEP)
    return gradient


def show(values: ArrayLike, digits: int = 4) -> str:
    """Return numbers as text with ``digits`` after the point, for example "0.5000 / 0.2500"."""
    return " / ".join(
        f"{value:.{digits}f}" for value in np.atleast_1d(np.asarray(values, dtype=np.float64))
    )


def magnitude(error: float) -> str:
    """Return a rounding error as text with one digit."""
    return "0" if error == 0 else f"{error:.0e}"


def zero(claim: str, error: float, limit: float = 1e-12) -> ClaimRow:
    """Return the row of a number that is 0 but for rounding."""
    return ClaimRow(claim, magnitude(error), "0", bool(error < limit))


def drawn(claim: str, measured: BatchEstimate, expected: ArrayLike) -> ClaimRow:
    """Return the row of an estimate with its expected value."""
    return ClaimRow(claim, str(measured), show(expected), measured.near(expected))


EXAMPLES = """\
  coppice dev theory                      everything
  coppice dev theory slate vpr --seed 1   two papers, other draws"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice dev theory."""
    parser = command_parser(
        "coppice dev theory",
        "Measure the claims of four papers, and the bias of corrections.",
        EXAMPLES,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(PAPERS)} (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of every random draw (default: 0)"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure the claims of the named papers (default: all). Return 1 if a row disagrees, 2 for an
    unknown name."""
    options = parser().parse_args(arguments)
    if unknown := set(options.names) - set(PAPERS):
        print(
            f"coppice dev theory: unknown {sorted(unknown)}; expected names from {list(PAPERS)}",
            file=sys.stderr,
        )
        return 2
    papers = options.names or PAPERS
    rows = [
        row
        for name in papers
        for row in importlib.import_module(f"{__name__}.{name}").rows(options.seed)
    ]
    cells = [("claim", "measured", "expected", "agrees")]
    for row in rows:
        cells.append((row.claim, row.measured, row.expected, "yes" if row.agrees else "NO"))
    print(*examination.table(cells), sep="\n")
    return int(not all(row.agrees for row in rows))
