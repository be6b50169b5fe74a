"""The OpenAI-compatible server over a real engine and real sockets: answers in the protocol's
shape, refusals that say why, and required calls, which are made by constraint."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import tokenizers
from aiohttp import web

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.actors.serving.server import Server
from coppice.wire.messages import GenerateRequest, Sampling
from tests import tiny
from tests.actors.test_local_engine import TOLERANCE, full_logprobs, reference

SETTINGS = ActorsConfig(dtype="float32", max_batch=8, max_context=1024, kv_cache_gib=0.01)
USER = {"messages": [{"role": "user", "content": "hi"}]}


class Client:
    def __init__(self, engine: LocalEngine, url: str, session: aiohttp.ClientSession):
        self.engine, self.url, self.session = engine, url, session

    async def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, Any]:
        sent = body if isinstance(body, bytes) else json.dumps(body)
        async with self.session.post(f"{self.url}/{path}", data=sent) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}/{path}", headers=headers) as response:
            return response.status, await response.json()

    async def completions(self, **fields: Any) -> Any:
        body = {"prompt": "a tree", "max_tokens": 8, **fields}
        status, reply = await self.post("completions", body)
        assert status == 200, reply
        return reply

    async def chat(self, **fields: Any) -> Any:
        status, reply = await self.post("chat/completions", {**USER, "max_tokens": 8, **fields})
        assert status == 200, reply
        return reply

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        body = {**body, "stream": True}
        async with self.session.post(f"{self.url}/{path}", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            *events, done, rest = (await response.text()).split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Client]:
    engine = LocalEngine(str(folder), SETTINGS)
    await engine.start()
    application = Server(engine, folder, **settings).application()
    made = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await made.setup()
    await web.TCPSite(made, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield Client(engine, f"http://127.0.0.1:{made.addresses[0][1]}/v1", session)
    await made.cleanup()
    await engine.close()


@pytest.fixture
async def client(llama: Path) -> AsyncIterator[Client]:
    async with serving(llama) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(llama: Path) -> AsyncIterator[Client]:
    async with serving(llama) as made:
        yield made


def encoded(folder: Path, text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


async def test_models_lists_the_one_model_served(client: Client, llama: Path) -> None:
    _, listed = await client.get("models")
    assert [(m["id"], m["object"]) for m in listed["data"]] == [(llama.name, "model")]
    assert await client.get(f"models/{llama.name}") == (200, listed["data"][0])
    other = await client.post("completions", {"prompt": "a", "model": "gpt"})
    for status, answer in (await client.get("models/meta/other"), other):
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_chat_is_the_completion_of_its_template(client: Client, llama: Path) -> None:
    greedy = {"max_tokens": 12, "temperature": 0}
    chat = await client.chat(**greedy)
    plain = await client.completions(prompt="<|user|>hi<|assistant|>", **greedy)
    assert (chat["object"], plain["object"]) == ("chat.completion", "text_completion")
    text = plain["choices"][0]["text"]
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert chat["usage"]["prompt_tokens"] == len(encoded(llama, "<|user|>hi<|assistant|>"))


async def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    free = (await client.completions(seed=5, max_tokens=24))["choices"][0]["text"]
    stop = free[6:8]
    for wanted in (stop, [stop, "never seen"]):
        choice = (await client.completions(seed=5, max_tokens=24, stop=wanted))["choices"][0]
        assert (choice["finish_reason"], choice["text"]) == ("stop", free[: free.index(stop)])


async def test_completion_logprobs_are_those_of_a_full_forward(client: Client, llama: Path) -> None:
    (choice,) = (await client.completions(logprobs=0, seed=6))["choices"]
    prompt = np.array(encoded(llama, "a tree"), np.int32)
    same = await client.engine.generate(GenerateRequest(prompt, 1, Sampling(8, seed=6)))
    expected = full_logprobs(reference(llama), prompt, same.samples[0].tokens)
    served = choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(served, expected, atol=TOLERANCE)
    (told,) = (await client.completions(logprobs=5, regex="[a-z]{8}"))["choices"]
    columns = (told["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*columns, strict=True):
        assert top[token] == logprob and len(top) in (5, 6)
        assert [*top.values()] == sorted(top.values(), reverse=True)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("completions", b"{not json", "JSON"),
        ("completions", b"[" * 100_000, "nested more than 100 deep"),
        ("completions", {"max_tokens": 4}, "prompt"),
        ("completions", {"prompt": ["a", ""]}, "prompt of 0 tokens"),
        ("completions", {"prompt": [260]}, "token ids"),
        ("completions", {"prompt": "a", "n": 9}, "max_batch"),
        ("completions", {"prompt": "a", "max_tokens": 9999}, "the context holds 1024"),
        ("completions", {"prompt": "a", "temperature": 1e-300}, "temperature"),
        ("completions", {"prompt": "a", "regex": "a", "guided_json": {}}, "one constraint"),
        ("completions", {"prompt": "a", "stream": True, "regex": "("}, "unclosed group"),
        ("chat/completions", USER | {"tool_choice": "sometimes"}, "tool_choice"),
        ("chat/completions", USER | {"max_tokens": 3, "max_completion_tokens": 4}, "expected one"),
        ("chat/completions", USER | {"chat_template_kwargs": {"loud": True}}, "loud"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_cannot_be_served_is_400_with_the_reason(
    refusing: Client, path: str, body: dict[str, Any] | bytes, reason: str
) -> None:
    status, reply = await refusing.post(path, body)
    assert status == 400
    assert reply["error"]["type"] == "invalid_request_error"
    assert reason in reply["error"]["message"]
    assert refusing.engine.counts["decoded_tokens"] == 0


@pytest.mark.parametrize("inline", [False, True])
async def test_a_template_sees_switches_and_special_tokens_and_its_refusal_is_told(
    tmp_path: Path, inline: bool
) -> None:
    text = "{{ messages[0]['content'] or raise_exception('no text') }}"
    template = "{{ bos_token }}{% if loud %}HEY {% endif %}" + text
    place = tiny.save(tmp_path) / "chat_template.jinja"
    place.write_text(template)
    if inline:
        place.unlink()
        settings = tmp_path / "tokenizer_config.json"
        whole = json.loads(settings.read_text()) | {"chat_template": template}
        settings.write_text(json.dumps(whole))
    async with serving(tmp_path) as client:
        for switches, text in (({}, "hi"), ({"loud": True}, "HEY hi")):
            reply = await client.chat(chat_template_kwargs=switches, max_tokens=1)
            # "<s>" is one token
            assert reply["usage"]["prompt_tokens"] == 1 + len(encoded(tmp_path, text))
        empty = {"messages": [{"role": "user", "content": ""}]}
        status, reply = await client.post("chat/completions", empty)
        assert (status, reply["error"]["message"]) == (400, "no text")


@pytest.mark.second
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_its_samples(client: Client, stream: bool) -> None:
    fields = {"prompt": "a", "n": 8, "max_tokens": 250, "temperature": 0}
    whole = (await client.completions(**fields))["usage"]["completion_tokens"]
    pending = asyncio.create_task(client.post("completions", {**fields, "stream": stream}))
    while client.engine.counts["decoded_tokens"] == whole:
        await asyncio.sleep(0)
    pending.cancel()
    await asyncio.wait([pending])
    await client.completions(n=8, max_tokens=1)  # needs every sample slot
    assert client.engine.counts["decoded_tokens"] - whole < whole


async def test_fields_at_the_value_that_changes_nothing_are_accepted(client: Client) -> None:
    plain = await client.chat(seed=2)
    fields = {"presence_penalty": 0, "top_logprobs": 0, "logit_bias": {}, "tools": None}
    fields |= {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True}
    same = await client.chat(seed=2, response_format={"type": "text"}, **fields)
    assert same["choices"] == plain["choices"]


async def test_token_ids_are_a_prompt_and_prompts_keep_order(client: Client, llama: Path) -> None:
    texts, fields = ["a tree", "two"], {"seed": 3, "n": 2}
    singles = [(await client.completions(prompt=text, **fields))["choices"] for text in texts]
    wanted = [choice["text"] for choices in singles for choice in choices]
    for prompt in (texts, [encoded(llama, text) for text in texts]):
        reply = await client.completions(prompt=prompt, **fields)
        assert [choice["text"] for choice in reply["choices"]] == wanted
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert reply["usage"]["prompt_tokens"] == sum(len(encoded(llama, text)) for text in texts)


GRADE = r"<explanation>[^<]{0,20}</explanation>\s{0,2}<score>(\+1|0|-1)</score>"
YES: dict[str, Any] = {"type": "object", "properties": {"yes": {"type": "boolean"}}}
YES |= {"required": ["yes"], "additionalProperties": False}
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": GRADE},
    {"structured_outputs": {"regex": GRADE}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "y", "schema": YES}}},
    {"json_schema": json.dumps(YES)},
    {"guided_json": YES},
]


@pytest.mark.parametrize("fields", CONSTRAINTS, ids=str)
async def test_every_choice_matches_the_constraint(client: Client, fields: dict[str, Any]) -> None:
    reply = await client.chat(n=4, max_tokens=120, **fields)
    for choice in reply["choices"]:
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(GRADE, text) or type(json.loads(text)["yes"]) is bool


LOGPROBS = {"logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", USER | LOGPROBS | {"n": 3, "stop": ["e", "no"]}),
        ("completions", {"prompt": ["a tree", "two"], "n": 2, "logprobs": 3}),
    ],
)
async def test_a_stream_joined_is_the_whole_answer(client: Client, path: str, asked: Any) -> None:
    asked = asked | {"seed": 4, "max_tokens": 30}
    # from here on the prompt is cached, so both are computed by the same sums
    await client.post(path, asked)
    _, whole = await client.post(path, asked)
    *chunks, last = await client.stream(path, asked | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    parts = [part for chunk in chunks for part in chunk["choices"]]
    for choice in whole["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        texts = [one["text"] if "text" in one else one["delta"].get("content", "") for one in own]
        assert "".join(texts) == choice.get("text", choice.get("message", {}).get("content"))
        for name in ("finish_reason", "logprobs"):
            assert [one[name] for one in own if one[name]] == [choice[name]]


async def test_without_its_key_a_server_answers_health_alone(llama: Path) -> None:
    async with serving(llama, name="mine", api_key="s3cret") as client:
        for header, key, status in (
            ("Authorization", "", 401),
            ("Authorization", "s3cret", 401),
            ("Authorization", "Bearer wrong", 401),
            ("X-Api-Key", "wrong", 401),
            ("X-Api-Key", "s3cret", 200),
            ("Authorization", "Bearer s3cret", 200),
        ):
            answered, reply = await client.get("models", **{header: key})
            assert answered == status
        assert reply["data"][0]["id"] == "mine"
        async with client.session.get(client.url.replace("/v1", "/health")) as response:
            assert response.status == 200


def schema(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    fixed = {"type": "object", "required": [*properties], "additionalProperties": False}
    return {**fixed, "properties": properties, **more}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def called(answer: dict[str, Any]) -> tuple[str, Any]:
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


LOOK = tool("look")
ADD = tool("add", parameters=schema({"a": {"enum": [1, 2]}, "b": {"enum": [3]}}))
ASKED = {"messages": [{"role": "user", "content": "1 + 3"}], "tools": [ADD], "max_tokens": 400}


@pytest.mark.parametrize("choice", ["required", tool("add")])
async def test_a_required_call_is_made_and_matches_its_schema(client: Client, choice: Any) -> None:
    answer = await client.chat(**ASKED, tool_choice=choice)
    assert [one["finish_reason"] for one in answer["choices"]] == ["tool_calls"]
    assert called(answer) in (("add", {"a": 1, "b": 3}), ("add", {"a": 2, "b": 3}))


@pytest.mark.second
async def test_definitions_of_several_tools_with_equal_names_are_kept_apart(client: Client) -> None:
    def nested(name: str, value: int) -> dict[str, Any]:
        definitions = {"Inner": schema({"v": {"enum": [value]}})}
        return tool(
            name, parameters=schema({"x": {"$ref": "#/$defs/Inner"}}, **{"$defs": definitions})
        )

    asked = ASKED | {"tools": [nested("one", 1), nested("two", 2)], "max_tokens": 190}
    for choice in (tool("two"), "required"):
        name, arguments = called(await client.chat(**asked, tool_choice=choice))
        assert arguments == {"x": {"v": {"one": 1, "two": 2}[name]}}


@pytest.mark.parametrize("definitions", [None, 5, [1]])
async def test_definitions_that_are_no_object_are_left_out_or_refused(
    client: Client, definitions: Any
) -> None:
    odd = tool("add", parameters=schema({"a": {"enum": [1]}}, definitions=definitions))
    body = ASKED | {"tools": [odd], "tool_choice": "required"}
    status, answer = await client.post("chat/completions", body)
    assert status == (200 if definitions is None else 400)
    if definitions is not None:
        expected = f"`tools.definitions`: {definitions}: expected an object"
        assert answer["error"]["message"] == expected


async def test_a_required_call_that_a_stop_string_cuts_is_text(client: Client) -> None:
    answer = await client.chat(**ASKED, tool_choice="required", stop=["arguments"])
    (one,) = answer["choices"]
    assert one["finish_reason"] == "stop"
    assert "".join(one["message"]["content"].split()) == '{"name":"add","'


async def test_responses_answer_in_their_own_words(client: Client) -> None:
    calling = {"tools": [{"type": "function", **ADD["function"]}], "tool_choice": "required"}
    body = {"input": "1 + 3", "instructions": "Add.", "max_output_tokens": 500}
    status, answer = await client.post("responses", body | calling)
    assert (status, answer["status"]) == (200, "completed"), json.dumps(answer)
    (item,) = answer["output"]
    assert (item["type"], item["name"]) == ("function_call", "add")
    status, answer = await client.post("responses", {"input": "hi", "max_output_tokens": 4})
    assert answer["output"][0]["type"] == "message"
    assert answer["usage"]["output_tokens"] <= 4
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [7]}}}
    body = {"input": "hi", "max_output_tokens": 20, "text": form}
    status, answer = await client.post("responses", body)
    assert answer["output"][0]["content"][0]["text"] == "7"


@pytest.mark.second
async def test_one_allowed_tool_is_called_and_all_are_in_the_prompt(client: Client) -> None:
    required = {"mode": "required", "tools": [{"type": "function", "name": "add"}]}
    chat = ASKED | {"tools": [LOOK, ADD]}
    choice = {"type": "allowed_tools", "allowed_tools": required}
    answer = await client.chat(**chat, tool_choice=choice)
    free = await client.chat(**chat, tool_choice="none")
    assert called(answer)[0] == "add"
    assert answer["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]


async def test_the_messages_dialect_is_served_with_calls_and_counts(client: Client) -> None:
    tools = [{"name": "add", "input_schema": ADD["function"]["parameters"]}]
    body = {"max_tokens": 400, "messages": ASKED["messages"], "tools": tools}
    body["tool_choice"] = {"type": "any"}
    status, message = await client.post("messages", body)
    (call,) = message["content"]
    assert (status, message["stop_reason"], call["name"]) == (200, "tool_use", "add")
    assert call["input"]["b"] == 3
    counted = (await client.post("messages/count_tokens", body))[1]["input_tokens"]
    assert counted == message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    status, answer = await client.post("messages", body | {"model": "claude"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")


async def test_a_body_that_is_not_compressed_as_it_says_is_refused(client: Client) -> None:
    url, headers = f"{client.url}/chat/completions", {"Content-Encoding": "gzip"}
    async with client.session.post(url, data=b"{}", headers=headers) as response:
        assert response.status == 400
        assert "the body cannot be read" in (await response.json())["error"]["message"]
