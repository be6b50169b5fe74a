"""What every process of a run does first."""

import resource
import subprocess
import sys

from coppice.common.process import FILES

BEGUN = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from coppice.common.process import begin
begin()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_process_may_open_as_many_files_as_the_system_grants() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    said = subprocess.run(
        [sys.executable, "-c", BEGUN], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [str(most), str(hard)]
