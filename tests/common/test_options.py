"""A strategy, scheme or correction that is not there, an option that it does not take and a value out
of range are refused with what is expected."""

from typing import Any

import pytest

from coppice.learner import schemes
from coppice.learner.update import corrections
from coppice.scheduler.growth import strategies

REFUSED = [
    (strategies, "arpo", {"initial": 20}, r"initial = 20: expected at most budget = 16"),
    (strategies, "spo", {"branching": []}, r"branching = \[\]: expected numbers of children"),
    (strategies, "treepo", {"first_divergence": 1}, r"= 1: expected at least divergence = 2"),
    (strategies, "treerl", {"token": 2}, r"\['token'\] unknown to strategy 'treerl'"),
    (schemes, "slat", {}, "slate"),
    (schemes, "slate", {"dof": 1}, "ddof"),
    (schemes, "ppr", {"normalisation": "mean"}, "'mean': expected"),
    (schemes, "gae", {"gamma": "high"}, "'high': expected"),
    (corrections, "ppo", {}, r"ppo.*expected one of.*ppo_clip"),
    (corrections, "ppo_clip", {"clip_lo": 0.1}, r"clip_lo.*to correction 'ppo_clip'.*clip_low"),
    (corrections, "tis", {"level": "trajectory"}, r"level = 'trajectory'.*token.*turn.*sequence"),
]


@pytest.mark.parametrize(("parts", "name", "options", "told"), REFUSED)
def test_what_a_part_cannot_take_is_refused(
    parts: Any, name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        parts.load(name, options)
