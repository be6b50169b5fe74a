"""The judge that asks a language model: every question ends in a reply or a counted fault that
names the cause; every placeholder of its templates is filled."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from coppice.judges.llm import PROMPTS, ChatClient, ChatEndpoint
from coppice.judges.slate import Slate, parse_score, reply_form
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn

Reply = Callable[[web.Request], Awaitable[web.Response]]


def chat(content: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def chat_server(reply: Reply, path: str = "POST /chat/completions") -> AsyncIterator[str]:
    app, (method, below) = web.Application(), path.split()
    app.router.add_route(method, f"/v1{below}", reply)
    async with serving(app) as url:
        yield f"{url}/v1"


@asynccontextmanager
async def started(make: Callable[[str], Any], reply: Reply) -> AsyncIterator[Any]:
    """A started judge or client, which ``make`` made of the URL of such a server."""
    async with chat_server(reply) as url:
        made = make(url)
        await made.start()
        yield made
        await made.close()


def client(url: str, **settings: Any) -> ChatClient:
    return ChatClient(ChatEndpoint(url, "m", **settings))


HELLO = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("constrain", ["", "sglang", "vllm"])
async def test_a_form_is_in_the_words_of_the_server(constrain: Any) -> None:
    seen: dict[str, Any] = {}

    async def reply(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return chat("a")

    fields = {"top_k": 3, "temperature": 0.5}
    settings: dict[str, Any] = {"constrain": constrain, "fields": fields}
    async with started(lambda url: Slate(ChatEndpoint(url, "m", **settings)), reply) as judge:
        assert await judge.reply("q") == ("a", "")
    regex = {"regex": reply_form(512)}
    words = {"": {}, "sglang": regex, "vllm": {"structured_outputs": regex}}
    usual = {"model": "m", "messages": HELLO, "max_tokens": 512}
    assert seen == usual | words[constrain] | fields


BODIES = [b"[]", b'{"choices": []}', b'{"choices": [{}]}', b"not json", b"7", b"", b"\xff"]


async def test_a_reply_that_ended_in_its_thinking_is_empty() -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": None}}]})

    async with started(client, reply) as c:
        assert await c.chat(HELLO, {}) == ""


@pytest.mark.parametrize("body", BODIES)
async def test_a_reply_that_is_not_the_protocol_is_final(body: bytes) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async with started(client, reply) as c:
        with pytest.raises(InfrastructureFault, match=r"not the chat protocol|no JSON"):
            await c.chat(HELLO, {})
        assert c.http.counts["requests"] == 1


@pytest.mark.parametrize(("status", "failed"), [(400, 0), (503, 1)])
async def test_a_refused_question_is_no_failure_because_it_would_be_refused_again(
    status: int, failed: int
) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(status=status)

    endpoint = partial(ChatEndpoint, model="m", attempts=1)
    async with started(lambda url: Slate(endpoint(url)), reply) as judge:
        assert (await judge.reply("q"))[0] == ""
        assert judge.failed == failed


async def test_a_cancelled_question_gives_its_place_back() -> None:
    entered, gate, calls = asyncio.Event(), asyncio.Event(), 0

    async def reply(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls == 1:
            entered.set()
            await gate.wait()
        return chat("ok")

    async with started(partial(client, concurrency=1), reply) as c:
        first = asyncio.create_task(c.chat(HELLO, {}))
        await entered.wait()
        first.cancel()
        assert await asyncio.wait_for(c.chat(HELLO, {}), 5) == "ok"
        gate.set()  # a server waits a minute for open handlers when it is taken down


PLACEHOLDERS = {
    "think": {"context", "thinking"},
    "query": {"context", "thinking", "query"},
    "answer": {"context", "ground_truth", "predicted_answer"},
}
NOWHERE = ChatEndpoint("http://127.0.0.1:1/v1", "m")


@pytest.mark.parametrize("column", PLACEHOLDERS)
def test_a_template_has_its_placeholders_and_does_not_itself_grade(column: str) -> None:
    text = (PROMPTS / f"slate_{column}.txt").read_text()
    assert set(re.findall(r"\{(\w+)\}", text)) == PLACEHOLDERS[column]
    assert parse_score(text) is None  # a model that repeats the instructions has not graded


def test_a_template_of_the_users_replaces_the_built_in_one(tmp_path: Path) -> None:
    own = tmp_path / "think.txt"
    own.write_text("Grade {thinking}. {unknown} stays.")
    judge = Slate(NOWHERE, {"think": str(own)})
    assert judge.prompts(JudgedTurn("Q", [], "", "", 1, 4, think="{context}"))["think"] == (
        "Grade {context}. {unknown} stays."
    )
    assert judge.templates["query"] == (PROMPTS / "slate_query.txt").read_text()
    with pytest.raises(ValueError, match=r"outcome.*think.*query.*answer"):
        Slate(NOWHERE, {"outcome": "x.txt"})


def test_all_prompts_of_one_context_begin_with_the_same_head_and_context() -> None:
    context = "Question: who?\nThinking: {query}\nQuery: a\nRetrieved: b"
    judge, turn = Slate(NOWHERE), partial(JudgedTurn, "Q", ["gold"], context, "", 1, 4)
    turns = [turn(think=f"I think {i}", query=f"query {i}") for i in range(4)]
    turns.append(turn(think="I think", answer="an answer"))
    made = [text for turn in turns for text in judge.prompts(turn).values()]
    head = judge.templates["think"].partition("{context}")[0] + context
    assert len(set(made)) == len(made) == 10
    assert all(text.startswith(f"{head}\n\n") for text in made)


@given(st.integers(62, 4000))
def test_a_constrained_reply_is_read_and_fits(max_tokens: int) -> None:
    form = reply_form(max_tokens)
    room = max_tokens - 46
    longest = f"<explanation>{'x' * room}</explanation>\n<score>+1</score>"
    assert re.fullmatch(form, longest)
    assert len(longest) < max_tokens  # of at least one character a token, with one left for the end
    assert parse_score(longest) == 1.0
    assert not re.fullmatch(form, longest.replace("x", "xx", 1))
    assert not re.fullmatch(form, longest.replace("+1", "2"))
