"""tools/launching/nodes.py: what a process finds on its node. The holder itself needs no cluster."""

import signal
from pathlib import Path

import pytest

from coppice.tools.launching import nodes
from coppice.tools.launching.nodes import Holder
from tests.tools.said import Patch

HERE = "tcp://10.0.0.1:7"


async def started(run: Path, code: str) -> Holder:
    """The holder of a process that runs ``code``, as rank 0 at 10.0.0.1:9."""
    (run / "endpoint").write_text(HERE)
    held = Holder()
    where = ("10.0.0.1", 9)
    assert (await held.start(["-c", code], run, HERE, run / "log", {}, str(run), where))[1] > 0
    return held


async def test_a_node_must_see_the_run_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(nodes, "_SEEN_S", 0.2)
    (tmp_path / "endpoint").write_text("tcp://10.0.0.1:6")  # of an earlier start
    for run in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"does not see the run folder.*disk that all"):
            await Holder().start([], run, HERE, tmp_path / "log", {}, "", None)


async def test_a_rank_is_told_where_they_meet_and_its_end_is_reported(tmp_path: Path) -> None:
    code = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    assert await (await started(tmp_path, code)).end() == 0
    assert (tmp_path / "log").read_text() == "10.0.0.1 9\n"


async def test_a_process_has_none_of_its_nodes_secrets(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("OTHERS_DATABASE", "RAY_AUTH_TOKEN", "HF_TOKEN", "VLLM_API_KEY", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "here")
    code = "import os; print(*sorted(k for k, v in os.environ.items() if v == 'here'), 'PATH' in os.environ)"
    assert await (await started(tmp_path, code)).end() == 0
    assert (tmp_path / "log").read_text() == "NCCL_DEBUG True\n"


@pytest.mark.second
@pytest.mark.parametrize("begun", [True, False])
async def test_the_question_for_stacks_is_survived(begun: bool, tmp_path: Path) -> None:
    begin = "from coppice.common.process import begin; begin()\n" if begun else ""
    code = f"{begin}import signal; print('ready', flush=True)\nwhile True: signal.pause()"
    held = await started(tmp_path, code)
    while "ready" not in (tmp_path / "log").read_text():
        pass
    doing, stacks = await held.activity()
    assert doing == "it waits (state S)"
    assert ('File "<string>", line ' in stacks) == begun
    await held.signal(signal.SIGTERM)
    assert await held.end() == -signal.SIGTERM
