"""tools/launching/nodes.py: what a process finds on its node, and that it is reported whole. The
holder itself needs no cluster."""

import asyncio
import signal
import stat
from pathlib import Path

import msgspec
import pytest

from coppice.tools.launching import nodes
from coppice.tools.launching.nodes import Delivery, Holder


def delivery(run: Path, separable: bool = True, command: list[str] | None = None) -> Delivery:
    """A process that prints its process file and its endpoint."""
    code = (
        "import pathlib, sys; f = pathlib.Path(sys.argv[1]);"
        " print(f.read_text(), (f.parents[1] / 'endpoint').read_text())"
    )
    keys = {"server_public": "public", "peers/judge.json": "secret"}
    body = msgspec.json.encode({"name": "judges", "run": str(run)})
    command, endpoint = command or ["-c", code], "tcp://10.0.0.1:7"
    return Delivery(command, str(run), "judges.json", body, endpoint, keys, {}, separable)


async def to_end(held: Holder, log: bytes = b"") -> tuple[bytes, int]:
    """The whole log, of which ``log`` has come already, and the exit status."""
    while (report := await held.report(len(log))).status is None:
        log += report.log
    return log + report.log, report.status


async def test_a_node_that_does_not_see_the_run_folder_gets_what_its_role_needs_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nodes.PLACE, str(tmp_path))
    held = Holder()
    assert (await held.start(delivery(tmp_path / "gone" / "run"), None))[1] > 0
    folder = held._own
    assert folder is not None
    assert folder.parent == tmp_path
    assert stat.S_IMODE((folder / "keys" / "peers" / "judge.json").stat().st_mode) == 0o600
    log, status = await to_end(held)
    assert status == 0
    assert f'"run":"{folder}"' in log.decode() and "tcp://10.0.0.1:7" in log.decode()
    assert list(tmp_path.iterdir()) == []


async def test_a_node_that_sees_the_run_folder_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nodes.PLACE, raising=False)
    (tmp_path / "endpoint").write_text("tcp://10.0.0.1:7")
    assert nodes.place(delivery(tmp_path, separable=False)) == (Path("judges.json"), None)


async def test_a_rank_whose_node_does_not_see_the_run_folder_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nodes.PLACE, raising=False)
    unseen = r"does not see the run folder.*learner\.publish_url"
    with pytest.raises(FileNotFoundError, match=unseen):
        nodes.place(delivery(tmp_path / "nowhere", separable=False))
    monkeypatch.setattr(nodes, "_SEEN_S", 0.2)
    # of an earlier start: the disk may only be late
    (tmp_path / "endpoint").write_text("tcp://10.0.0.1:6")
    with pytest.raises(FileNotFoundError, match="does not see the run folder"):
        await asyncio.to_thread(nodes.place, delivery(tmp_path, separable=False))


async def test_a_log_is_reported_whole_in_pieces_and_a_signal_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "PIECE", 1000)
    monkeypatch.setenv(nodes.PLACE, str(tmp_path))
    code = "import os, signal; print('x' * 5000, flush=True); signal.pause()"
    held = Holder()
    await held.start(delivery(tmp_path / "run", command=["-c", code]), ("10.0.0.1", 9))
    log = b""
    while len(log) < 5001:
        log += (await held.report(len(log))).log
    await held.signal(signal.SIGTERM)
    assert await to_end(held, log) == (b"x" * 5000 + b"\n", -signal.SIGTERM)


@pytest.mark.parametrize("begun", [True, False])
async def test_a_process_of_another_node_that_has_not_begun_survives_the_question_for_stacks(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nodes.PLACE, str(tmp_path))
    begin = "from coppice.common.process import begin; begin()\n" if begun else ""
    held = Holder()
    code = f"{begin}import signal; print('ready', flush=True)\nwhile True: signal.pause()"
    await held.start(delivery(tmp_path / "run", command=["-c", code]), None)
    ready = await held.report(0)
    doing, stacks = await held.activity()
    assert doing == "it waits (state S)"
    assert ('File "<string>", line ' in stacks) == begun
    await held.signal(signal.SIGTERM)
    assert await to_end(held, ready.log) == (b"ready\n" + stacks.encode(), -signal.SIGTERM)


async def test_the_ranks_are_told_where_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nodes.PLACE, str(tmp_path))
    held = Holder()
    code = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    await held.start(delivery(tmp_path / "run", command=["-c", code]), ("10.0.0.1", 9))
    assert await to_end(held) == (b"10.0.0.1 9\n", 0)
