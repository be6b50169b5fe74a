"""tools/launching/children.py: shared memory of processes that were killed."""

import subprocess
import sys
from multiprocessing import shared_memory

import pytest

from coppice.tools.launching.children import SHARED_MEMORY, mapped_segments, sweep_segments

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this system has no /dev/shm")
TAKES = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_once_unmapped() -> None:
    process = subprocess.Popen([sys.executable, "-c", TAKES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = SHARED_MEMORY / process.stdout.readline().strip()
    segments = mapped_segments([process.pid])
    assert str(path) in segments
    process.kill()
    process.communicate()
    mine = shared_memory.SharedMemory(path.name)
    sweep_segments(segments)
    assert path.exists()
    mine.close()
    sweep_segments(segments)
    assert not path.exists()
