"""coppice evaluate: real games against real opponents, by a model, an endpoint and baselines."""

import asyncio
import base64
import errno
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from coppice.actors.config import ActorProcess, ActorsConfig
from coppice.actors.engines.endpoint import EndpointText, whole
from coppice.actors.environments.base import SPLIT
from coppice.actors.environments.sotopia.environment import DIMENSIONS
from coppice.scheduler.config import SchedulerConfig, SchedulerProcess
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating import main
from coppice.tools.evaluating.examination import EvaluationCosts, total_costs
from coppice.tools.evaluating.folder import claim
from coppice.tools.inspecting.dump import main as dump
from coppice.wire import digest
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import Manifest
from tests import tiny
from tests.pictures import Colours, squares
from tests.tools.said import Patch, Said

Reply = Callable[[web.Request], Awaitable[web.Response]]


@contextmanager
def served(reply: Reply) -> Iterator[str]:
    """The URL of a server that answers with ``reply``, on a thread of its own."""
    ready, done = threading.Event(), asyncio.Event()
    port: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        app = web.Application()
        app.router.add_post("/v1/{what:.*}", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        port.append(runner.addresses[0][1])
        ready.set()
        await done.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port[0]}/v1"
    finally:
        loops[0].call_soon_threadsafe(done.set)
        thread.join()
        assert not asyncio.all_tasks(loops[0]), "a reply that nobody waits for is cancelled"


def chat(text: str | None, **choice: Any) -> web.Response:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 5}
    return web.json_response(
        {"choices": [{"message": message, "finish_reason": "stop", **choice}], "usage": usage}
    )


Before = Callable[[int], web.Response | asyncio.Event | None]


class Player:
    """Answers a request with what it ``says`` to it. before: what happens at each request, by its
    number; an event is waited for."""

    def __init__(self, says: Callable[[Any], str], before: Before = lambda number: None):
        self.says, self.before, self.requests = says, before, 0
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, request: web.Request) -> web.Response:
        self.requests += 1
        answer = self.before(self.requests)
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        elif answer is not None:
            return answer
        self.seen.append(await request.json())
        return chat(self.says(self.seen[-1]))


def interrupting(at: int, failing: int) -> Before:
    def before(number: int) -> web.Response | asyncio.Event | None:
        if number == at:
            os.kill(os.getpid(), signal.SIGINT)
            return asyncio.Event()  # a reply might come before the interruption, and be kept
        return web.Response(status=500) if number == failing else None

    return before


def legal(request: Any) -> str:
    """A legal move that depends on the prompt alone; the protocol cuts the stop string off."""
    prompt = request["messages"][0]["content"]
    free = prompt.split("Empty cells: ")[1].split("\n")[0].split()
    return f"I take <action>{free[sum(prompt.encode()) % len(free)]}"


def at_endpoint(url: str, out: Path, *more: str) -> list[str]:
    words = f"tictactoe --endpoint {url} --endpoint-model m --opponent random --games 12"
    words += f" --concurrency 1 --oracle-option kind=minimax --out {out}"
    return [*words.split(), *more]


def run_folder(
    folder: Path, model: Path, environment: str, options: dict[str, Any], settings: SchedulerConfig
) -> Path:
    actor = ActorProcess("actor-0", str(folder), 0, str(model), ActorsConfig(max_context=1024))
    scheduler = SchedulerProcess(
        "s", str(folder), 0, str(model), environment, options, "", "", 1, [], 6, settings
    )
    (folder / "processes").mkdir(parents=True)
    for name, process in (("actor-0", actor), ("scheduler", scheduler)):
        (folder / "processes" / f"{name}.json").write_bytes(msgspec.json.encode(process))
    return folder


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_bytes())


def played(out: Path) -> list[Any]:
    journal = Journal(out / "journal.sqlite", readonly=True)
    trees = [(row, journal.tree(row).nodes.values()) for row in journal.trees()]
    return [
        (row.id, row.task, row.status, [(n.kind, n.text, n.scores) for n in nodes])
        for row, nodes in trees
    ]


def test_table_json_and_journal_agree(llama: Path, tmp_path: Path, said: Said) -> None:
    out = tmp_path / "out"
    words = f"tictactoe --opponent minimax --games 8 --max-tokens 4 --model {llama}"
    command = [*words.split(), "--out", out]
    table, found = said(main, *command), result(out)
    assert found["headline"] == "return"
    measures = found["measures"]
    lost = measures["return"]
    assert (lost["mean"], lost["n"]) == (-1.0, 8), "random weights say nothing legal"
    assert measures["return_first"]["n"] == measures["return_second"]["n"] == 4
    assert f"{lost['mean']:.3f} ±{lost['half']:.3f}" in table
    journal = Journal(out / "journal.sqlite", readonly=True)
    actions = [action for row in journal.trees() for action in journal.tree(row).actions()]
    assert found["generated_tokens"] == sum(len(action.tokens) for action in actions)
    again = json.loads(said(main, *command, "--json"))
    assert again == found, "a finished evaluation is only reported again"
    assert len(said(dump, out, "--heldout", "--all", "--json").splitlines()) == 8


def test_a_run_plays_with_its_newest_weights_and_its_prompt(llama: Path, tmp_path: Path) -> None:
    other, run = tiny.save(tmp_path / "other", seed=5), tmp_path / "run"
    folder = run / "weights" / "v000003"
    folder.mkdir(parents=True)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    proof = digest.safetensors_file(folder / "model.safetensors")
    Manifest(3, "full", proof).write(folder)
    options = {"prompt": "tictactoe_compact", "opponents": {"random": 1.0}}
    run_folder(run, llama, "tictactoe", options, SchedulerConfig(max_action_tokens=7))
    both = "tictactoe --games 2 --opponent minimax --oracle-option kind=minimax --out"
    for words in (
        f"{both} {tmp_path}/a --run {run}",
        f"{both} {tmp_path}/b --model {other} --max-tokens 7 --option prompt=tictactoe_compact",
        f"{both} {tmp_path}/c --run {run} --version 0",
    ):
        assert main(words.split()) == 0
    assert played(tmp_path / "a") == played(tmp_path / "b")
    assert played(tmp_path / "a") != played(tmp_path / "c")
    assert result(tmp_path / "a")["settings"]["version"] == 3


def test_players_without_a_model_have_their_known_strength(tmp_path: Path) -> None:
    known = [("first", "minimax", -1.0, -0.7), ("random", "random", -0.4, 0.4)]
    for name, opponent, low, high in known:
        words = f"tictactoe --baseline {name} --opponent {opponent} --games 60"
        words += f" --oracle-option kind=minimax --out {tmp_path / name}"
        assert main(words.split()) == 0
        measures = result(tmp_path / name)["measures"]
        assert low <= measures["return"]["mean"] <= high
        assert measures["valid"]["mean"] == 1.0


@pytest.mark.second
def test_a_player_without_a_model_chooses_among_listed_replies(tmp_path: Path) -> None:
    assert main(["webshop", "--baseline", "first", "--games", "6", "--out", str(tmp_path)]) == 0
    measures = result(tmp_path)["measures"]
    assert (measures["valid"]["mean"], measures["success"]["n"]) == (1.0, 6)
    assert measures["turns"]["mean"] == 10, "the same search until the actions are used up"


def test_the_default_opponent_is_a_search_of_the_simulations_asked_for(tmp_path: Path) -> None:
    words = f"tictactoe --baseline random --games 6 --simulations 50 --no-oracle --out {tmp_path}"
    assert main(words.split()) == 0
    opponents = result(tmp_path)["settings"]["opponents"]
    assert opponents == {"tictactoe_mcts": {"simulations": 50}}


def test_conversations_have_a_partner_and_a_judge_of_their_own(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if asked[-1]["messages"][0]["content"].startswith("You judge"):
            score = {"reasoning": "r", "score": 0}
            scores = dict.fromkeys(DIMENSIONS, score)
            return chat(json.dumps({"agent_1": scores, "agent_2": scores}))
        return chat(json.dumps({"action_type": "speak", "argument": "9 percent, and Friday."}))

    with served(reply) as url:
        words = f"sotopia --endpoint {url} --endpoint-model m --games 4 --option turns=4"
        command = f"{words} --option partner=chat --option judge=sotopia --out {tmp_path}".split()
        endpoint = f'endpoint={{url="{url}", model="partner"}}'
        longer = endpoint.replace("}", ", max_tokens=2048}")
        assert main([*command, "--speaker-option", endpoint, "--oracle-option", longer]) == 0
    measures = result(tmp_path)["measures"]
    assert measures["valid"]["mean"] == 1 and measures["turns"]["mean"] == 2
    assert set(DIMENSIONS) < set(measures) and measures["goal"]["mean"] == 0
    assert sum(one["model"] == "partner" for one in asked) == 4 * 2 + 4  # and four judgements


@pytest.mark.second
def test_an_endpoint_plays_and_a_limit_is_waited_for(tmp_path: Path) -> None:
    limit = web.Response(status=429, headers={"Retry-After": "0.01"})
    player = Player(legal, lambda number: limit if number == 2 else None)
    with served(player) as url:
        field = ("--endpoint-field", "reasoning_effort=low")
        assert main(at_endpoint(url, tmp_path, *field)) == 0
    found = result(tmp_path)
    assert found["measures"]["valid"]["mean"] == 1.0
    assert found["engine"]["retries"] == 1
    assert found["generated_tokens"] == 5 * (player.requests - 1)
    first = player.seen[0]
    assert (first["model"], first["stop"]) == ("m", ["</action>"])
    assert first["reasoning_effort"] == "low"


@pytest.mark.second
def test_an_endpoint_that_fails_is_named(tmp_path: Path, said: Said, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TEST_PLAYER_KEY", "s3cret")

    async def broken(request: web.Request) -> web.Response:
        key = request.headers["Authorization"]
        return web.Response(status=500, text=f"out of memory for {key}")

    with served(broken) as url:
        words = "--attempts 2 --api-key-env TEST_PLAYER_KEY"
        told = said(main, *at_endpoint(url, tmp_path, *words.split()), status=1)
    assert f"{url}/chat/completions: HTTP 500: out of memory" in told
    assert "2 attempts" in told and "go on with: coppice evaluate tictactoe" in told
    assert "s3cret" not in told
    assert not [path for path in tmp_path.iterdir() if b"s3cret" in path.read_bytes()]


@pytest.mark.parametrize(
    ("content", "finish", "more", "text"),
    [
        ("<action>5", "stop", {}, "<action>5</action>"),
        ("<action>5", "length", {}, "<action>5"),
        ("5", "stop", {"matched_stop": "</action>"}, "5</action>"),
        (None, "length", {}, ""),
    ],
)
def test_the_stop_string_the_protocol_cuts_off_is_put_back(
    content: str | None, finish: str, more: dict[str, Any], text: str
) -> None:
    choice = {"message": {"content": content}, "finish_reason": finish, **more}
    assert whole(choice, ["</action>"]) == text


@given(st.text(), st.text())
def test_messages_survive_the_way_through_the_tree(shared: str, own: str) -> None:
    text = EndpointText()
    shared, own = shared.replace(SPLIT, ""), own.replace(SPLIT, "")
    message = {"role": "user", "content": f"{shared}{SPLIT}{own}"}
    head, split, tail = text.prompt([message]).partition(SPLIT)
    assert split == SPLIT
    tokens = np.concatenate([text.encode(head), text.encode(tail)])
    assert json.loads(text.decode(tokens)) == [{"role": "user", "content": shared + own}]


def test_an_endpoint_gets_pictures_as_data_urls() -> None:
    text, colours = EndpointText(), Colours()
    task = colours.task(3)
    prompt = text.prompt(colours.prompt(task, colours.initial(task)))
    (message,) = json.loads(prompt.replace(SPLIT, ""))
    head, _, body = message["content"][3]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body) == squares(3)


PLAYED = "tictactoe --baseline first"
FIRST = f"{PLAYED} --opponent random --games 2"


@pytest.mark.second
def test_an_interruption_changes_no_result(tmp_path: Path, said: Said) -> None:
    whole_run, parts = Player(legal), Player(legal, interrupting(14, failing=25))
    with served(whole_run) as url:
        assert main(at_endpoint(url, tmp_path / "whole")) == 0
    with served(parts) as url:
        command = at_endpoint(url, tmp_path / "parts", "--attempts", "1")
        assert "stopped; go on with: coppice evaluate" in said(main, *command, status=130)
        assert any(status == "growing" for _, _, status, _ in played(tmp_path / "parts"))
        assert main(command) == 1, "the server failed"
        assert main(command) == 0
    assert played(tmp_path / "parts") == played(tmp_path / "whole")
    assert len(played(tmp_path / "parts")) == 12
    assert result(tmp_path / "parts")["measures"] == result(tmp_path / "whole")["measures"]
    assert parts.requests == whole_run.requests + 2, "no answer that was kept was asked for again"


@pytest.mark.second
def test_the_turns_of_an_interrupted_conversation_do_not_count(tmp_path: Path, said: Said) -> None:
    asked = itertools.count(1)

    async def reply(request: web.Request) -> web.Response:
        if (number := next(asked)) in (6, 8):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        action = "speak" if number <= 6 else "leave"
        return chat(json.dumps({"action_type": action, "argument": "hello" if number <= 6 else ""}))

    with served(reply) as url:
        words = f"sotopia --endpoint {url} --endpoint-model m --games 2 --option side=first"
        command = [*words.split(), "--concurrency", "1", "--out", str(tmp_path / "o")]
        said(main, *command, status=130)
        said(main, *command, status=130)  # the first conversation ends in this session
        assert main(command) == 0
    assert result(tmp_path / "o")["measures"]["turns"]["mean"] == 1


def test_a_library_draws_the_sides_of_its_games(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    moves = ",".join(f'"[{n}]"' for n in range(9))
    words = f"textarena --baseline random --games 2 --option players=2 --option actions=[{moves}]"
    command = [*words.split(), "--option", "id=TicTacToe-v0", "--out", str(tmp_path)]
    assert main(command) == 0
    settings = result(tmp_path)["settings"]
    assert (settings["options"]["second"], settings["sides"]) == (0.5, "as drawn")


def test_other_settings_are_refused_by_name(tmp_path: Path, said: Said, refused: Said) -> None:
    command = f"{FIRST} --out {tmp_path / 'o'}".split()
    said(main, *command)
    assert "was begun with games = 2, now it is 3" in refused(main, *command, "--games", "3")


def test_a_full_disk_harms_no_folder(tmp_path: Path, monkeypatch: Patch, said: Said) -> None:
    write, out = Path.write_bytes, tmp_path / "new"

    def full(path: Path, content: bytes) -> int:
        write(path, content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    command = f"{FIRST} --out {out}".split()
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        assert main(command) == 2
        assert [path.name for path in out.iterdir()] == ["lock"]
    (out / "evaluation.json.draft").write_bytes(b"{")
    assert main(command) == 0, "what a dead process left of its settings is no other evaluation"
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        kept = "No space left on device\nwhat was played is kept; go on with: "
        assert kept in said(main, *command, status=1), "only the result is written again"
    assert result(out)["games"] == 2, "the result of before is whole"


def test_torn_files_are_mended_or_named(tmp_path: Path) -> None:
    torn = b'{"games":1,"seconds":2,"engine":{"x":3}}\n{"games":1,"sec'
    (tmp_path / "sessions.jsonl").write_bytes(torn)
    assert total_costs(tmp_path / "sessions.jsonl") == EvaluationCosts(2, {"x": 3})
    with (tmp_path / "sessions.jsonl").open("ab") as file:
        file.write(b"{}\n")
    named = r"sessions\.jsonl:2: .*remove that line"
    with pytest.raises(InfrastructureFault, match=named):
        total_costs(tmp_path / "sessions.jsonl")
    (tmp_path / "evaluation.json").write_bytes(b'{"games"')
    with pytest.raises(ValueError, match=r"evaluation\.json holds no settings.*another --out"):
        claim(tmp_path, EvaluationCosts(2, {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("chess --baseline first", "expected one of"),
        ("search_qa --baseline first", "reads task files"),
        (f"{PLAYED} --option size=7", "--option: ['size'] unknown"),
        (f"{PLAYED} --opponent random --option opponents={{random=1}}", "give one of them"),
        (f"{PLAYED} --opponent random --simulations 9", "--simulations has no effect"),
        (f"{PLAYED} --endpoint-model m", "--endpoint-model has no effect without --endpoint"),
        (f"{PLAYED} --no-oracle --oracle-option kind=minimax", "no effect with --no-oracle"),
        ("sudoku --baseline first --opponent random", "has no opponent"),
        ("tictactoe --model no/such/folder/here", "--model"),
        ("tictactoe --run no-such-run", "expected the folder of a run"),
        ("bfcl --endpoint http://a/v1 --endpoint-model m --option wheel=pyproject.toml", "SHA-256"),
        ("tictactoe --endpoint http://localhost/v1", "--endpoint-model"),
        ("tictactoe --endpoint http://key@localhost/v1 --endpoint-model m", "without a key"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(
    tmp_path: Path, refused: Said, monkeypatch: Patch, arguments: str, message: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refused(main, *arguments.split(), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_variable_of_a_key_that_is_not_set_is_named(tmp_path: Path, refused: Said) -> None:
    words = "tictactoe --endpoint http://a/v1 --endpoint-model m --api-key-env NO_KEY"
    assert "NO_KEY" in refused(main, *words.split(), "--out", tmp_path)
