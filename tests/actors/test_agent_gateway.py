"""The gateway by itself, over HTTP: whose request it is, what it refuses, how streams and retries
are answered, and which rewards it takes."""

import asyncio
import json
from typing import Any

import pytest

from coppice.actors.environments.agents import gateway as module
from coppice.actors.environments.agents.gateway import Session
from coppice.actors.serving import replies
from coppice.actors.serving.conversations import Conversation
from coppice.actors.serving.replies import Reply
from coppice.common.tool_calls import ToolCall
from coppice.wire.messages import Passage
from tests.actors.conftest import HELLO, Door

ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


async def test_a_session_is_its_key_wherever_a_client_puts_it(door: Door) -> None:
    key = door.session.key
    for prefix, headers in ((f"/s/{key}", {}), ("", door.own), ("", {"X-Session-ID": key})):
        reply = await door.chat(Reply("hi"), prefix=prefix, **headers)
        assert reply["choices"][0]["message"]["content"] == "hi" and reply["model"] == "gpt-any"


async def test_an_unknown_key_is_401_and_a_closed_session_409_also_a_waiter(door: Door) -> None:
    for path, body in (("chat/completions", HELLO), ("episode/reward", {"reward": 1})):
        assert (await door.post(path, body, Authorization="Bearer nobody"))[0] == 401
    assert door.session.reward is None
    waiting = asyncio.create_task(door.refused("chat/completions", HELLO))
    await door.request()
    door.gateway.end(door.session, "the episode has ended")
    for status, said in (
        await waiting,
        await door.refused("chat/completions", HELLO),
        await door.refused("responses", {"input": "x"}),
        await door.refused("episode/reward", {"reward": 1}),
        await door.refused("retrieve", {"queries": ["x"]}),
    ):
        assert status == 409 and "the episode has ended" in said


CHAT, RESPONSES, REWARD = "chat/completions", "responses", "episode/reward"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": 2}, "`n`"),
    (CHAT, {"response_format": {"type": "json_object"}}, "`response_format`"),
    (CHAT, {"stop": {"a": 1}}, "stop"),
    (CHAT, {"tools": [ADD], "tool_choice": {"type": "function", "function": 1}}, "`tool_choice`"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "'wizard': expected system"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "`content`"),
    (RESPONSES, {"top_logprobs": 5}, "`top_logprobs`"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}}}}, "`response_format`"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "a", "arguments": 1}]}, "tool call"),
    (RESPONSES, {"previous_response_id": "resp-1"}, "`previous_response_id`"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "m"}]}, "`item_reference`: 'm'"),
    (REWARD, {"reward": int("9" * 400)}, "reward"),
]
NEEDED = {CHAT: HELLO, RESPONSES: {"input": "x"}, REWARD: {}}


@pytest.mark.parametrize(("path", "body", "said"), REFUSED)
async def test_what_cannot_be_answered_is_named(
    door: Door, path: str, body: Any, said: str
) -> None:
    status, message = await door.refused(path, NEEDED[path] | body)
    assert status == 400 and said in message
    assert not door.session.waiting


async def test_a_stream_that_waits_sends_comments_and_tells_its_refusal(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "KEEPALIVE_S", 0.01)
    url, body = f"{door.gateway.url}/chat/completions", {**HELLO, "stream": True}
    for ended in (False, True):
        async with door.http.post(url, json=body, headers=door.own) as response:
            request = await door.request()
            lines = [await response.content.readline() for _ in range(3)]
            assert lines == [b": waiting\n", b"\n", b": waiting\n"]
            if ended:
                door.gateway.end(door.session, "the episode has ended")
            else:
                door.session.answer(request, Reply("hi"))
            rest = (await response.content.read()).decode()
        assert ("the episode has ended" in rest, "[DONE]" in rest) == (ended, not ended)


@pytest.mark.parametrize(("body", "scored"), [({}, False), ({"return_scores": True}, True)])
async def test_passages_come_as_search_r1_sends_them(
    door: Door, body: dict[str, Any], scored: bool
) -> None:
    async def found(query: str, topk: int) -> list[Passage]:
        return [Passage(str(topk), query, "text", 0.5)]

    door.session.retrieve = found
    status, text = await door.post("retrieve", {"queries": ["a"], "topk": None, **body})
    document = {"id": "3", "contents": '"a"\ntext'}
    expected = {"document": document, "score": 0.5} if scored else document
    assert (status, json.loads(text)) == (200, {"result": [[expected]]})


@pytest.mark.parametrize(("path", "kept"), [("retrieve", False), (CHAT, True)])
async def test_an_agents_own_mistake_is_no_refusal_of_the_policy(
    door: Door, path: str, kept: bool
) -> None:
    assert (await door.post(path, {"queries": 1, "messages": 1}))[0] == 400
    assert bool(door.session.refused) == kept


async def test_ids_repeat_with_what_is_asked_and_a_waiting_call_is_known_again(door: Door) -> None:
    digests = ["a", "b", "a", *map(str, range(20))]
    answers, again = [
        [session.ask(Conversation([]), digest) for digest in digests]
        for session in (door.session, Session("key"))
    ]
    assert [name for name, _ in answers] == [name for name, _ in again]
    assert len({name for name, _ in answers}) == len(digests)
    assert door.session.ask(Conversation([]), "a", again=True) == answers[2]
    for request in [*door.session.waiting.values()]:
        door.session.answer(request, Reply("x"))
    door.session.ask(Conversation([]), "more")  # answered calls are forgotten, but for the last
    assert door.session.ask(Conversation([]), "19", again=True) == answers[-1]
    assert door.session.ask(Conversation([]), "0", again=True) != answers[3]


async def test_of_an_ended_session_only_its_key_is_kept_and_of_many_the_last(door: Door) -> None:
    keys = list[str]()
    for _ in range(module.CLOSED + 1):
        session = door.gateway.opened()
        keys.append(session.key)
        door.gateway.end(session, "the episode has ended")
    assert list(door.gateway.sessions) == [door.session.key]
    for key, status in ((keys[0], 401), (keys[1], 409), (keys[-1], 409)):
        assert (await door.post("retrieve", {}, Authorization=f"Bearer {key}"))[0] == status


async def test_errors_of_http_itself_are_told_in_the_protocols_form(door: Door) -> None:
    url = f"{door.gateway.url}/chat/completions"
    async with door.http.get(url, headers=door.own) as wrong:
        said = (await wrong.json())["error"]["message"]
        assert wrong.status == 405 and "GET /v1/chat/completions" in said
    status, said = await door.refused("chat/completions", {"messages": "x" * module.LARGEST_BODY})
    assert status == 413 and str(module.LARGEST_BODY) in said


async def test_items_and_responses_are_known_by_id_in_their_own_session(door: Door) -> None:
    tools = [{"type": "function", "name": "add", "parameters": {}}]
    requests: list[Conversation] = []

    async def turn(reply: Reply, **body: Any) -> dict[str, Any]:
        body = {"instructions": "Add.", "tools": tools, **body}
        request, text = await door.turn(reply, "responses", body)
        requests.append(request)
        return json.loads(text)

    user = {"role": "user", "content": "1 + 2"}
    calling = Reply("I add.", [ToolCall("add", '{"a": 1}'), ToolCall("add", "{}")])
    first = await turn(calling, input=[user])
    said, *calls = first["output"]
    ids = [call["call_id"] for call in calls]
    results = [{"type": "function_call_output", "call_id": one, "output": "3"} for one in ids]
    parts = [{"type": "input_text", "text": "3"}]
    references = [{"type": "item_reference", "id": said["id"]}]
    references += [{"id": call["id"]} for call in calls]
    await turn(Reply("3"), input=[user, *first["output"], *results])
    await turn(Reply("3"), input=[user, *references, *results])
    await turn(Reply("3"), input=results, previous_response_id=first["id"])
    in_parts = [{**result, "output": parts} for result in results]
    await turn(Reply("3"), input=in_parts, previous_response_id=first["id"])
    assert all(request.messages == requests[1].messages for request in requests[2:])
    assert len(requests[1].messages) == 5
    door.session = door.gateway.opened()
    for body in ({"input": references}, {"input": "x", "previous_response_id": first["id"]}):
        assert (await door.post("responses", body))[0] == 400


async def test_a_reply_can_be_rewarded_until_the_next_request_only(door: Door) -> None:
    session = door.session
    first = (await door.chat(Reply("one")))["id"]
    assert (await door.post(REWARD, {"reward": 0.5, "response_id": first}))[0] == 200
    assert session.step_reward == 0.5
    second = (await door.chat(Reply("two")))["id"]
    assert session.step_reward is None and second != first
    for name in (first, "chatcmpl-", "", second):
        status, _ = await door.post(REWARD, {"reward": 0.25, "response_id": name})
        assert status == (200 if name in ("", second) else 409)
    assert (session.reward, session.step_reward) == (0.25, 0.25)
