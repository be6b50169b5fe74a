"""A key may do what its role says and nothing else, and a living worker's name and connection stay
its own."""

import asyncio
import os
from pathlib import Path

import pytest

from coppice.scheduler.dispatch.calls import DispatchConfig
from coppice.wire.arrays import encode
from coppice.wire.keys import ROLES, PeerKeys, RunKeys
from coppice.wire.messages import SERVICES, Goodbye, Heartbeat, Register, Result
from coppice.wire.service import Call, Rejected, Service
from coppice.wire.sockets import Dealer
from tests.services import Bench, EchoRequest, EchoResult, ask, bench, echo


async def thief(request: EchoRequest, call: Call) -> EchoResult:
    return EchoResult(request.tokens, 666)


async def answered_by(b: Bench) -> int:
    return (await b.dispatcher.call("echo", ask(), deadline=30)).version


async def refused(b: Bench, name: str, services: list[str], keys: PeerKeys) -> str:
    """Try to register; return the words in which the scheduler refused."""
    service = Service(name, dict.fromkeys(services, thief), 4)
    with pytest.raises(Rejected) as error:
        await service.run(b.dispatcher.endpoint, keys, signals=False)
    return str(error.value)


async def test_a_living_workers_name_is_not_taken_over_by_another_key(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("actor-0", {"echo": echo})
        words = await refused(b, "actor-0", ["echo"], b.run_keys.mint("other", ("echo",)))
        assert "a living worker of this name has another key" in words
        assert await answered_by(b) == 0
        assert b.dispatcher.counters["refused_peers"] == 1


@pytest.mark.parametrize("role", sorted(ROLES))
async def test_every_role_offers_its_own_services_and_no_other(tmp_path: Path, role: str) -> None:
    async with bench(tmp_path) as b:
        keys = PeerKeys.load(tmp_path / "keys", role)
        for kind in sorted(set(SERVICES) - {"echo"} - set(ROLES[role])):
            words = await refused(b, f"sly-{kind}", [ROLES[role][0], kind], keys)
            assert f"its key may offer {', '.join(ROLES[role])}, and not {kind}" in words
        assert b.dispatcher.workers() == []
        own = Service("own", dict.fromkeys(ROLES[role], echo), 4)
        b.tasks["own"] = asyncio.create_task(own.run(b.dispatcher.endpoint, keys, signals=False))
        await b.dispatcher.wait_for(ROLES[role][0], 1, 30)


@pytest.mark.second
async def test_a_minted_key_is_good_at_once_and_a_revoked_one_sent_away(tmp_path: Path) -> None:
    async with bench(tmp_path, DispatchConfig(heartbeat_s=0.05)) as b:
        name, invitation = RunKeys(tmp_path / "keys").invite("judge.mine", b.dispatcher.endpoint)
        guest = Service("guest", {"judge.mine": echo}, 4)
        serving = asyncio.create_task(guest.run(b.dispatcher.endpoint, invitation, signals=False))
        await b.dispatcher.wait_for("judge.mine", 1, 30)
        RunKeys(tmp_path / "keys").revoke(name)
        with pytest.raises(Rejected, match="its key was revoked"):
            await asyncio.wait_for(serving, 30)
        assert b.dispatcher.workers() == []
        late = Service("guest", {"judge.mine": echo}, 4, give_up_s=0.5)
        # the handshake itself is refused
        with pytest.raises(Rejected, match="a key that was not revoked"):
            await late.run(b.dispatcher.endpoint, invitation, signals=False)


async def test_a_lost_workers_identity_is_refused_to_another_key(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        identity = b"actor-0/1/known"
        victim = Dealer(b.dispatcher.endpoint, b.keys, identity)
        victim.send(encode(Register("actor-0", ["echo"], 1, 1, "h")))
        await b.dispatcher.wait_for("echo", 1, 30)
        asked = asyncio.create_task(answered_by(b))
        victim.close()  # cut off while the scheduler waits for its answer
        async with asyncio.timeout(30):
            while not (attempts := list(b.dispatcher.workers()[0].in_flight)):
                await asyncio.sleep(0.005)
        other = b.run_keys.mint("other", ("judge",))
        spy = Dealer(b.dispatcher.endpoint, other, identity)
        forged = [
            encode(Result(attempts[0]), EchoResult(ask().tokens, 666)),
            encode(Heartbeat(0, {})),
            encode(Goodbye("drained")),
            encode(Register("actor-0", ["judge.x"], 1, 1, "h")),
        ]
        for frames in forged:
            spy.send(frames)
        for frames in ([b"garbage"], [b""]):
            spy.send(frames)
        async with asyncio.timeout(30):
            while b.dispatcher.counters["malformed_peers"] < 2:
                await asyncio.sleep(0.005)
        assert b.dispatcher.counters["refused_peers"] == len(forged)
        assert not asked.done()
        assert [worker.name for worker in b.dispatcher.workers()] == ["actor-0"]
        spy.close()
        asked.cancel()


def test_a_damaged_key_file_grants_nothing_and_names_stay_in_the_folder(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path / "keys")
    pair = keys.mint("mine", ("judge",))
    (tmp_path / "keys" / "peers" / "mine.json").write_text('{"public": 3')
    keys.reload()
    assert keys.grant(pair.public) is None
    (tmp_path / "outside.json").write_text("{}")
    for name in ("../../outside", "/etc/passwd", "", ".hidden"):
        with pytest.raises(ValueError, match="cannot name a key"):
            keys.mint(name, ("judge",))
        with pytest.raises(ValueError, match="no key is named"):
            keys.revoke(name)
    assert os.path.exists(tmp_path / "outside.json")


def test_a_grant_that_cannot_be_read_for_a_moment_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RunKeys.create(tmp_path)
    own = keys.mint("actor-0", ("generate",))
    grant = keys.grant(own.public)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: os.fstat(-1))
        keys.reload()
    assert keys.grant(own.public) == grant
