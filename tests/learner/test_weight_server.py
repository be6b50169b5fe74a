"""Whoever reaches the learner's rendezvous without the run's token learns no secret there and
cannot slip in a pickle."""

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from coppice.actors.engines.sglang_transport import Rendezvous
from coppice.learner.model.weight_server import Snapshot, WeightServer, bound_store
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import Memory, opened, prefix, sealed

ASK = {"version": 3, "transport": "tensor", "ranks": 1}


def outsider(memory: Memory) -> TCPStore:
    host, _, port = memory.store.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=20))


def test_the_token_is_nowhere_in_the_store_and_no_ask_without_it_is_served() -> None:
    giver = WeightServer(timeout_s=20)
    try:
        memory = giver.offer(Snapshot(3, {"w": torch.ones(4)}))
        talk = Rendezvous(memory, 20)
        assert talk.ask(ASK)["buckets"][0]["names"] == ["w"]
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
        talk.done()
    finally:
        giver.close()


def test_an_answer_of_somebody_else_never_reaches_a_server() -> None:
    meeting = bound_store("127.0.0.1", timedelta(seconds=20))
    memory = Memory(f"127.0.0.1:{meeting.port}", "h", "cpu", token="the run's token")

    def forge() -> None:
        store = PrefixStore(prefix(memory.token), outsider(memory))
        store.get("ask/1")
        store.set("answer/1", sealed("a guess", "answer/1", json.dumps({"buckets": [{"payloads": ["gASV"]}]})))

    forger = threading.Thread(target=forge)
    forger.start()
    with pytest.raises(InfrastructureFault, match="was not written by this run"):
        Rendezvous(memory, 20).ask(ASK)
    forger.join()


def test_an_answer_to_another_ask_is_no_answer(tmp_path: Path) -> None:
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
