"""The trained frontier of a checkpoint, as ``state.json`` holds it: which version trained each
group, and the metrics of the newest updates."""

from pathlib import Path

import msgspec

FILE = "state.json"


class Frontier(msgspec.Struct, frozen=True):
    """version: that of the weights. trained: runs (first id, last id, version) of groups with
    consecutive ids that one version trained. records: the metrics of the newest updates, by
    version."""

    version: int = 0
    trained: list[tuple[int, int, int]] = []
    records: dict[int, dict[str, float]] = {}

    def groups(self) -> dict[int, int]:
        """Return the version that trained each group, by the group's id."""
        return {group: version for a, b, version in self.trained for group in range(a, b + 1)}


def runs(groups: dict[int, int]) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive ids with equal versions, ascending: {4: 1, 5: 1, 7: 2} is [(4,
    5, 1), (7, 7, 2)]."""
    joined: list[tuple[int, int, int]] = []
    for group, version in sorted(groups.items()):
        if joined and joined[-1][1:] == (group - 1, version):
            joined[-1] = (joined[-1][0], group, version)
        else:
            joined.append((group, group, version))
    return joined


def read(run: Path, version: int) -> Frontier:
    """Return the frontier of the newest checkpoint that is not newer than ``version``, empty if
    there are no checkpoints. Raises ValueError if all are newer or one is damaged, and OSError."""
    folders = sorted((run / "checkpoints").glob("v??????"))
    newest = max((path for path in folders if path.name <= f"v{version:06d}"), default=None)
    if newest is None:
        if folders:
            raise ValueError(f"the oldest checkpoint is {folders[0].name}")
        return Frontier()
    return msgspec.json.decode((newest / FILE).read_bytes(), type=Frontier)
