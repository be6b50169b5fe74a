"""Whoever reaches the learner's rendezvous without the run's token learns no secret there and
cannot answer in the learner's place."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from coppice.actors.engines.servers import Facts
from coppice.actors.engines.sglang_transport import Pull
from coppice.learner.model.weight_server import WeightServer, bound_store
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import Manifest, Memory, opened, prefix, sealed

ASK = {"version": 3, "ranks": 1}


def pull(memory: Memory) -> Pull:
    """What a server asks; the server itself is not asked."""
    server: Any = None
    return Pull(server, Facts(), Manifest(3, "full", "d", False, memory), 20)


def outsider(memory: Memory) -> TCPStore:
    host, _, port = memory.store.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=20))


async def test_the_token_is_nowhere_in_the_store_and_no_ask_without_it_is_served() -> None:
    giver = WeightServer(timeout_s=20)
    try:
        memory = giver.offer(9, [{"w": torch.ones(4)}])
        talk = pull(memory)
        with pytest.raises(InfrastructureFault, match="asked for version 3, gives 9"):
            talk.ask({"w": [4]})
        spy = outsider(memory)
        keys = [key for key in spy.list_keys() if key.startswith(prefix(memory.token))]
        assert keys
        assert not any(memory.token in key or memory.token.encode() in spy.get(key) for key in keys)
        store = PrefixStore(prefix(memory.token), spy)
        number = store.add("asked", 1)
        store.set(f"ask/{number}", json.dumps(ASK))  # as anyone could write it
        answer = json.loads(opened(memory.token, f"answer/{number}", store.get(f"answer/{number}")))
        assert "was not written by this run" in answer["error"]
        store.set(f"done/{number}", "1")
        await talk.release()
    finally:
        giver.close()


def test_an_answer_of_somebody_else_never_reaches_a_server() -> None:
    meeting = bound_store("127.0.0.1", timedelta(seconds=20))
    memory = Memory(f"127.0.0.1:{meeting.port}", "cpu", token="the run's token")

    def forge() -> None:
        store = PrefixStore(prefix(memory.token), outsider(memory))
        store.get("ask/1")
        store.set(
            "answer/1", sealed("a guess", "answer/1", json.dumps({"buckets": [{"names": ["w"]}]}))
        )

    forger = threading.Thread(target=forge)
    forger.start()
    with pytest.raises(InfrastructureFault, match="was not written by this run"):
        pull(memory).ask({"w": [4]})
    forger.join()


def test_an_answer_to_another_ask_is_no_answer() -> None:
    stored = sealed("token", "answer/1", "{}").encode()
    assert opened("token", "answer/1", stored) == "{}"
    for key, damaged in (
        ("answer/2", stored),
        ("answer/1", stored + b" "),
        ("answer/1", b""),
        ("answer/1", b"\xff" * 70),
    ):
        with pytest.raises(ValueError, match=r"not written by this run|decode"):
            opened("token", key, damaged)


def given(giver: WeightServer, version: int) -> torch.Tensor:
    """The first tensor, as a broadcast of this version sends it."""
    return giver._given(version)[0].at(version).view(torch.bfloat16)


def test_the_version_before_is_served_from_what_changed_since() -> None:
    giver = WeightServer(timeout_s=20)
    try:
        old, wide = torch.randn(40_000).bfloat16(), torch.randn(4, 5)
        new = old.clone()
        new[[0, 7, 39_999]] += 1
        for version, one, two in ((1, old, wide), (2, new, wide), (3, -new, -wide)):
            giver.offer(version, [{"w": one}, {"v": two}])
            if version > 1:
                before = old if version == 2 else new
                assert torch.equal(given(giver, version - 1), before)
            assert torch.equal(given(giver, version), one)
        with pytest.raises(LookupError, match="asked for version 1, gives 2, 3"):
            given(giver, 1)
    finally:
        giver.close()
