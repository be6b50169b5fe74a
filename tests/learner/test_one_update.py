"""The example of the whole loop is short enough to be read at once, and its policy learns."""

from pathlib import Path
from statistics import mean

import pytest

from examples import one_update


@pytest.mark.slow
async def test_the_policy_of_the_example_learns_in_twelve_updates(tmp_path: Path) -> None:
    rewards = await one_update.main(tmp_path, 12)
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.15
