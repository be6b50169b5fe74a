"""coppice serve --invite gives a judge on another machine what it needs and no more; --revoke takes
it back."""

import asyncio
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from coppice.judges.command import plug_in, reachable
from coppice.scheduler.dispatch.calls import DispatchConfig
from coppice.wire.keys import RunKeys
from coppice.wire.messages import JudgedTurn, JudgeRequest
from tests.services import bench

ROOT = Path(__file__).parent.parent.parent
PLUG = """
from coppice.judges.base import Judge
from coppice.wire.messages import Judgement
class Mine(Judge):
    name, columns = "mine", ("reward",)
    async def score(self, turns):
        return [Judgement({"reward": 0.5}) for _ in turns]
class Other(Mine):
    name = "other"
"""


def started(run: Path, endpoint: str) -> RunKeys:
    keys = RunKeys.create(run / "keys")
    (run / "endpoint").write_text(endpoint)
    return keys


async def guest(folder: Path, judge: str) -> asyncio.subprocess.Process:
    command = (sys.executable, str(ROOT / "tools" / "serve"), judge, "--invite-file", "mine.json")
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, cwd=folder, stderr=pipe)


@pytest.mark.slow
async def test_an_invited_judge_serves_with_the_invitation_alone_until_it_is_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "plug.py").write_text(PLUG)
    async with bench(run, DispatchConfig(heartbeat_s=0.1)) as b:
        started(run, b.dispatcher.endpoint)
        to = str(elsewhere / "mine.json")
        assert plug_in(["--run", str(run), "--invite", "judge.mine", "--to", to]) == 0
        name = capsys.readouterr().err.split(" ", 1)[0]
        guests = (guest(elsewhere, "plug:Mine"), guest(elsewhere, "plug:Other"))
        serving, sly = await asyncio.gather(*guests)
        await b.dispatcher.wait_for("judge.mine", 1, 60)
        request = JudgeRequest([JudgedTurn("q", [], "", "", 1, 1)])
        result: Any = await b.dispatcher.call("judge.mine", request, deadline=30)
        assert result.judgements[0].scores == {"reward": 0.5}
        said = (await asyncio.wait_for(sly.communicate(), 60))[1].decode()
        assert sly.returncode == 1
        assert "its key may offer judge.mine, and not judge.other" in said
        assert "Traceback" not in said
        assert plug_in(["--run", str(run), "--revoke", name]) == 0
        said = (await asyncio.wait_for(serving.communicate(), 60))[1].decode()
        assert serving.returncode == 1
        assert "its key was revoked" in said


def test_an_invitation_holds_four_facts_in_a_private_file_and_the_run_keeps_no_secret_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = started(tmp_path, "tcp://127.0.0.1:1")
    assert plug_in(["--run", str(tmp_path), "--invite", "judge.mine"]) == 0
    told = capsys.readouterr()
    invitation = json.loads(told.out)
    assert told.out.count("\n") == 1
    assert set(invitation) == {"endpoint", "server_public", "public", "secret"}
    assert "reached from this machine alone" in told.err
    assert invitation["secret"] not in told.err
    stored = [path.read_text() for path in (tmp_path / "keys").rglob("*") if path.is_file()]
    assert not any(invitation["secret"] in text for text in stored)
    secrets = (keys.server_secret, *(text for text in stored if "secret" in text))
    assert not any(secret in told.out for secret in secrets)
    to = tmp_path / "i.json"
    assert plug_in(["--run", str(tmp_path), "--invite", "judge.mine", "--to", str(to)]) == 0
    assert stat.S_IMODE(to.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "run", "--invite", "train"], "no peer can be invited to 'train'"),
        (["--run", "run", "--invite", "judge/../x"], "no peer can be invited to 'judge/../x'"),
        (["--run", "run", "--revoke", "nobody"], "no key is named 'nobody': expected one of actor"),
        (["--run", "nowhere", "--invite", "judge.mine"], "nowhere is not a started run"),
        (["--invite-file", "there", "--invite", "judge.mine"], "--invite and --revoke need --run"),
        (["exact_match", "--invite-file", "there"], "there is no invitation"),
        (["exact_match", "--invite-file", "absent"], "No such file"),
        (["--run", "run", "--invite", "judge.mine", "--to", "there"], "there is there already"),
        (["--run", "open", "--invite", "judge.mine"], "every address (tcp://0.0.0.0:1)"),
    ],
)
def test_an_invitation_that_cannot_be_given_or_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    started(tmp_path / "run", "tcp://127.0.0.1:1")
    started(tmp_path / "open", "tcp://0.0.0.0:1")
    (tmp_path / "there").write_text("hello")
    monkeypatch.chdir(tmp_path)
    assert plug_in(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("coppice serve: ")
    assert error.count("\n") == 1


def test_the_guest_is_told_the_address_by_which_it_reaches_the_run() -> None:
    assert reachable("tcp://0.0.0.0:5555", "gpu-1") == "tcp://gpu-1:5555"
    assert reachable("tcp://10.0.0.5:5555", "") == "tcp://10.0.0.5:5555"
