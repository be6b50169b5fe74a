"""The gateway by itself, over HTTP: whose request it is, what it refuses, how streams and retries
are answered, and which rewards it takes."""

import asyncio
import json
import weakref
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.agents import gateway as module
from coppice.actors.environments.agents.episode import Ended, Episode, ForkServer
from coppice.actors.environments.agents.gateway import Gateway, Session
from coppice.actors.environments.base import Spent
from coppice.actors.serving import replies
from coppice.actors.serving.replies import Reply
from coppice.common.tool_calls import ToolCall
from tests.actors.conftest import HELLO, Door

ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


SANE = [
    {**HELLO, "tools": [ADD], "tool_choice": "auto"},
    {"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add"}}]}]},
    {"queries": ["x"], "topk": 1},
    {"reward": 1.0},
]
FIELDS = (
    "messages input instructions tools tool_choice model max_tokens stream stream_options text n"
    " stop response_format logprobs functions previous_response_id reward response_id queries topk"
).split()
WORDS = (
    "role content type text tool_calls tool_call_id function name arguments call_id output"
    " parameters format id"
).split()
PATHS = ["chat/completions", "responses", "episode/reward", "retrieve"]


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


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "`n`"),
    ({"response_format": {"type": "json_object"}}, "`response_format`"),
    ({"logprobs": True, "top_logprobs": 2}, "`logprobs`"),
    ({"functions": [ADD["function"]]}, "`functions`"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"type": "function", "function": "add"}]}, "`tools`"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": "add"}}, "`tool_choice`"),
    ({"tool_choice": "required"}, "`tool_choice`"),
    ({"messages": []}, "`messages`"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}, "call"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "'wizard': expected system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "`content`"),
    ({"max_tokens": 0}, "`max_tokens`"),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "`response_format`"),
    ({"text": "x"}, "text"),
    ({"input": [{"type": "function_call", "name": "add", "arguments": 1}]}, "tool call"),
    ({"previous_response_id": "resp-1"}, "`previous_response_id`"),
    ({"conversation": {"id": "conv_1"}}, "`conversation`"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "`item_reference`: 'msg_1'"),
]
REWARDS: list[tuple[Any, str]] = [
    ({"reward": int("9" * 400)}, "reward"),
    ({"reward": "good"}, "`reward`: 'good': expected `float`"),
]
REFUSED = [
    *(("chat/completions", HELLO | body, said) for body, said in CHATS),
    *(("responses", {"input": "x"} | body, said) for body, said in RESPONSES),
    *(("episode/reward", body, said) for body, said in REWARDS),
]


@pytest.mark.parametrize(("path", "body", "said"), REFUSED)
async def test_what_cannot_be_answered_is_refused_with_its_name(
    door: Door, path: str, body: Any, said: str
) -> None:
    status, message = await door.refused(path, body)
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


async def test_a_repeated_request_joins_only_if_it_says_so(door: Door) -> None:
    first = await door.chat(Reply("one"))
    again = {**door.own, "x-stainless-retry-count": "1"}
    same = json.loads((await door.post("chat/completions", HELLO, **again))[1])
    assert same | {"created": 0} == first | {"created": 0}
    second = await door.chat(Reply("two"))
    assert second["choices"][0]["message"]["content"] == "two" and second["id"] != first["id"]
    new = {"messages": [{"role": "user", "content": "other"}]}
    other = await door.chat(Reply("three"), new, **again)
    assert other["choices"][0]["message"]["content"] == "three"


async def test_a_call_that_waits_is_known_again_behind_many_others(door: Door) -> None:
    answers = [door.session.ask(module.Conversation([]), f"{number}") for number in range(20)]
    assert door.session.ask(module.Conversation([]), "0", again=True) == answers[0]
    for request in [*door.session.waiting.values()]:
        door.session.answer(request, Reply("x"))
    door.session.ask(module.Conversation([]), "more")
    assert len(door.session._answers) == module.REMEMBERED + 1


async def test_of_an_ended_session_only_its_key_is_kept_and_of_many_the_last(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSED", 2)
    keys, alive = list[str](), weakref.WeakSet[Session]()

    def play() -> None:
        session = door.gateway.opened()
        alive.add(session)
        keys.append(session.key)
        door.gateway.end(session, "the episode has ended")

    for _ in range(3):
        play()
    assert not alive and list(door.gateway.sessions) == [door.session.key]
    bearers = [f"Bearer {key}" for key in keys]
    late = [(await door.post("retrieve", {}, Authorization=key))[0] for key in bearers]
    assert late == [401, 409, 409]


async def test_errors_of_http_itself_are_told_in_the_protocols_form(door: Door) -> None:
    url = f"{door.gateway.url}/chat/completions"
    async with door.http.get(url, headers=door.own) as wrong:
        said = (await wrong.json())["error"]["message"]
        assert wrong.status == 405 and "GET /v1/chat/completions" in said
    status, said = await door.refused("nothing", HELLO)
    assert status == 404 and "/v1/nothing" in said
    status, said = await door.refused("chat/completions", {"messages": "x" * module.LARGEST_BODY})
    assert status == 413 and str(module.LARGEST_BODY) in said


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
JSON: Any = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELD = st.sampled_from(FIELDS)
BODIES: Any = st.dictionaries(FIELD, JSON) | st.builds(
    lambda sane, name, value: {**sane, name: value}, st.sampled_from(SANE), FIELD, JSON
)


async def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


@pytest.mark.second
def test_no_body_is_answered_with_an_error_of_the_server() -> None:
    with asyncio.Runner() as runner:
        gateway = Gateway()
        runner.run(gateway.start())
        http = runner.run(client())
        door = Door(gateway, http)

        async def answering() -> None:
            while True:
                door.session.answer(await door.request(), Reply("x"))

        task = runner.get_loop().create_task(answering())

        @settings(max_examples=60, deadline=None, derandomize=True)
        @given(st.sampled_from(PATHS), BODIES)
        def ask(path: str, body: Any) -> None:
            status, text = runner.run(door.post(path, body))
            assert status in (200, 400, 404, 409), (path, body, status, text)
            assert status == 200 or "message" in json.loads(text)["error"]

        ask()
        task.cancel()
        runner.run(http.close())
        runner.run(gateway.close())


async def test_items_and_responses_are_known_by_id_in_their_own_session(door: Door) -> None:
    tools = [{"type": "function", "name": "add", "parameters": {}}]
    requests: list[module.Conversation] = []

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
    references = [{"type": "item_reference", "id": said["id"]}]
    references += [{"id": call["id"]} for call in calls]
    second = await turn(Reply("3"), input=[user, *first["output"], *results])
    await turn(Reply("3"), input=[user, *references, *results])
    await turn(Reply("3"), input=results, previous_response_id=first["id"])
    assert requests[1].messages == requests[2].messages == requests[3].messages
    assert len(requests[1].messages) == 5
    await turn(Reply("ok"), input="More.", previous_response_id=second["id"])
    roles = " ".join(m["role"] for m in requests[4].messages)
    assert roles == "system user assistant tool tool assistant user"
    door.session = door.gateway.opened()
    for body in ({"input": references}, {"input": "x", "previous_response_id": first["id"]}):
        assert (await door.post("responses", body))[0] == 400


async def lasting() -> Ended:
    """A process that does not end."""
    await asyncio.Event().wait()
    return Ended(None)


async def test_a_reply_can_be_rewarded_until_the_next_request_only(door: Door) -> None:
    episode = Episode(door.gateway, ForkServer([]), {})
    door.session = session = episode.session
    episode._ended = asyncio.create_task(lasting())

    async def turn(text: str) -> str:
        asking = asyncio.create_task(door.post("chat/completions", HELLO))
        asked = await episode.next()
        assert isinstance(asked, module.Conversation)
        episode.answer(asked, Reply(text))
        return json.loads((await asking)[1])["id"]

    first = await turn("one")
    assert (await door.post("episode/reward", {"reward": 0.5, "response_id": first}))[0] == 200
    assert session.step_reward == 0.5
    second = await turn("two")
    assert session.step_reward is None and second != first
    for name in (first, "chatcmpl-", "", second):
        status, _ = await door.post("episode/reward", {"reward": 0.25, "response_id": name})
        assert status == (200 if name in ("", second) else 409)
    assert (session.reward, session.step_reward) == (0.25, 0.25)
    episode._ended.cancel()


def test_ids_repeat_in_a_session_that_repeats_what_was_asked() -> None:
    async def names() -> list[str]:
        session = Session("key")
        return [session.ask(module.Conversation([]), digest)[0] for digest in ("a", "b", "a")]

    one, other = asyncio.run(names()), asyncio.run(names())
    assert one == other and len(set(one)) == 3


async def test_neutral_fields_and_other_ways_to_write_messages_change_nothing(door: Door) -> None:
    neutral = {"response_format": {"type": "text"}, "logprobs": False, "functions": [], "n": 1}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "assistant", "content": None, "reasoning_content": "r"},
    ]
    body = {"messages": messages, **neutral}
    request, _ = await door.turn(Reply("x"), "chat/completions", body)
    system, empty = {"role": "system", "content": "a"}, {"role": "assistant", "content": ""}
    assert request.messages == [system, empty]


async def test_usage_is_what_was_spent(door: Door) -> None:
    usage = (await door.chat(Reply("hi", spent=Spent(10, 4, 3))))["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
    assert counts == (10, 3, 13)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
