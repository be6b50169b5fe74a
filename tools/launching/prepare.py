"""The set-up of a run in a process of its own, so that the launcher, which waits for it, never
holds torch in memory."""

from coppice.common.process import Killed, in_subprocess
from coppice.tools.launching import agent_trial
from coppice.tools.launching.assets import Assets
from coppice.tools.launching.config import Config


def prepare(config: Config) -> Assets:
    """Try the agent, if the run has one, and make every asset that is not cached yet. Raises
    FileNotFoundError, ValueError or MemoryError with the remedy."""
    try:
        agent_trial.check(config)
        return in_subprocess(_prepare, config)
    except Killed:
        raise MemoryError(
            "the set-up's process was killed, most likely for memory: free some, then start again"
        ) from None


def _prepare(config: Config) -> Assets:
    from coppice.tools.launching import set_up  # it imports torch

    return set_up.prepare(config)
