"""The OpenAI-compatible server over a real engine and real sockets: answers in the protocol's
shape, refusals that say why."""

import asyncio
import io
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
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.actors.serving.server import LARGEST_BODY, Server, runner
from coppice.wire.messages import GenerateRequest, Sampling
from tests import tiny
from tests.actors.test_local_engine import full_logprobs, reference

GREATEST_DIFFERENCE = 2e-5
"""Between served log-probabilities and a plain float32 forward."""

SETTINGS = ActorsConfig(dtype="float32", max_batch=8, max_context=256, kv_cache_gib=0.01)
USER = {"messages": [{"role": "user", "content": "hi"}]}


class Client:
    """Posts to a started server."""

    def __init__(self, engine: LocalEngine, url: str, session: aiohttp.ClientSession):
        self.engine, self.url, self.session = engine, url, session

    async def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, Any]:
        """Status and decoded reply."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(f"{self.url}/{path}", data=sent) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and decoded reply."""
        async with self.session.get(f"{self.url}/{path}", headers=headers) as response:
            return response.status, await response.json()

    async def completions(self, **fields: Any) -> Any:
        """A completion that must succeed."""
        body = {"prompt": "a tree", "max_tokens": 8, **fields}
        status, reply = await self.post("completions", body)
        assert status == 200, reply
        return reply

    async def chat(self, **fields: Any) -> Any:
        """A chat that must succeed."""
        status, reply = await self.post("chat/completions", {**USER, "max_tokens": 8, **fields})
        assert status == 200, reply
        return reply

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that must end well."""
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
    made = runner(Server(engine, folder, **settings))
    await made.setup()
    await web.TCPSite(made, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield Client(engine, f"http://127.0.0.1:{made.addresses[0][1]}/v1", session)
    await made.cleanup()
    await engine.close()


@pytest.fixture
async def client(llama: Path) -> AsyncIterator[Client]:
    """A server of the tiny Llama."""
    async with serving(llama) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(llama: Path) -> AsyncIterator[Client]:
    """A server that all refusals share, for none of them reaches its engine."""
    async with serving(llama) as made:
        yield made


def encoded(folder: Path, text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


async def test_models_lists_the_one_model_served(client: Client, llama: Path) -> None:
    _, listed = await client.get("models")
    assert [(m["id"], m["object"]) for m in listed["data"]] == [(llama.name, "model")]
    assert await client.get(f"models/{llama.name}") == (200, listed["data"][0])
    status, answer = await client.get("models/meta/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_chat_is_the_completion_of_its_template(client: Client, llama: Path) -> None:
    greedy = {"max_tokens": 12, "temperature": 0}
    chat = await client.chat(**greedy)
    plain = await client.completions(prompt="<|user|>hi<|assistant|>", **greedy)
    assert (chat["object"], plain["object"]) == ("chat.completion", "text_completion")
    text = plain["choices"][0]["text"]
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert chat["usage"]["prompt_tokens"] == len(encoded(llama, "<|user|>hi<|assistant|>"))


async def test_n_choices_share_one_prefill_and_usage_counts_every_token(client: Client) -> None:
    reply = await client.completions(n=5, seed=1)
    assert [choice["index"] for choice in reply["choices"]] == list(range(5))
    assert {choice["finish_reason"] for choice in reply["choices"]} <= {"stop", "length"}
    assert len({choice["text"] for choice in reply["choices"]}) > 1
    usage = reply["usage"]
    assert usage["completion_tokens"] == client.engine.counts["decoded_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert client.engine.counts["prefilled_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize("several", [False, True])
async def test_a_stop_string_ends_the_text_before_it(client: Client, several: bool) -> None:
    free = (await client.completions(seed=5, max_tokens=24))["choices"][0]["text"]
    stop = free[6:8]
    wanted = [stop, "never seen"] if several else stop
    choice = (await client.completions(seed=5, max_tokens=24, stop=wanted))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == free[: free.index(stop)]


async def test_completion_logprobs_are_those_of_a_full_forward(client: Client, llama: Path) -> None:
    (choice,) = (await client.completions(logprobs=0, seed=6))["choices"]
    prompt = np.array(encoded(llama, "a tree"), np.int32)
    same = await client.engine.generate(GenerateRequest(prompt, 1, Sampling(8, seed=6)))
    expected = full_logprobs(reference(llama), prompt, same.samples[0].tokens)
    served = choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(served, expected, atol=GREATEST_DIFFERENCE)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("completions", b"{not json", "JSON"),
        ("completions", b'{"prompt": "\xff"}', "utf"),
        ("completions", b"[" * 100_000, "nested more than 100 deep"),
        ("completions", b"[]", "JSON object"),
        ("completions", {"max_tokens": 4}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ["a", ""]}, "prompt of 0 tokens"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": ["a"] * 129}, "prompt"),
        ("completions", {"prompt": [260]}, "token ids"),
        ("completions", {"prompt": "a", "n": 9}, "max_batch"),
        ("completions", {"prompt": "a", "max_tokens": 9999}, "the context holds 256"),
        ("completions", {"prompt": "a", "max_tokens": "4"}, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": 1e-300}, "temperature"),
        ("completions", {"prompt": "a", "top_p": 1.5}, "top_p"),
        ("completions", {"prompt": "a", "stop": ""}, "stop"),
        ("completions", {"prompt": "a", "echo": True}, "echo"),
        ("completions", {"prompt": "a", "guided_choice": ["a", "b"]}, "`guided_choice`"),
        ("completions", {"prompt": "a", "structured_outputs": {"choice": ["a"]}}, "choice"),
        ("completions", {"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ("completions", {"prompt": "a", "logprobs": 6}, "logprobs"),
        ("completions", {"prompt": "a", "logprobs": True}, "logprobs"),
        ("completions", {"prompt": "a", "stream_options": {}}, "stream_options"),
        ("completions", {"prompt": "a", "regex": "a", "guided_json": {}}, "one constraint"),
        ("completions", {"prompt": "a", "stream": True, "regex": "("}, "unclosed group"),
        ("completions", {"prompt": "a", "json_schema": '{"type": "nothing"}'}, "nothing"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", USER | {"top_logprobs": 3}, "without `logprobs`: true"),
        ("chat/completions", USER | {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat/completions", USER | {"tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", USER | {"max_tokens": 3, "max_completion_tokens": 4}, "expected one"),
        ("chat/completions", USER | {"response_format": {"type": "json_schema"}}, "json_schema"),
        ("chat/completions", USER | {"response_format": {"type": "xml"}}, "response_format"),
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


@asynccontextmanager
async def with_template(folder: Path, template: str) -> AsyncIterator[Client]:
    """A server of a model with another chat template."""
    (tiny.save(folder) / "chat_template.jinja").write_text(template)
    async with serving(folder) as made:
        yield made


async def test_a_template_that_refuses_a_conversation_is_400_and_its_reason(tmp_path: Path) -> None:
    async with with_template(tmp_path, "{{ raise_exception('roles must alternate') }}") as client:
        status, reply = await client.post("chat/completions", USER)
        assert (status, reply["error"]["message"]) == (400, "roles must alternate")


async def test_a_switch_of_the_template_reaches_it(tmp_path: Path) -> None:
    loud = "{% if loud %}HEY {% endif %}{{ messages[0]['content'] }}"
    async with with_template(tmp_path, loud) as client:
        for switches, text in (({}, "hi"), ({"loud": True}, "HEY hi")):
            reply = await client.chat(chat_template_kwargs=switches)
            assert reply["usage"]["prompt_tokens"] == len(encoded(tmp_path, text))


async def test_a_template_in_the_tokenizer_settings_sees_special_tokens(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "inline")
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    async with serving(folder) as client:
        reply = await client.chat(max_tokens=1)
        # "<s>" is one token
        assert reply["usage"]["prompt_tokens"] == 1 + len(encoded(folder, "hi"))


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


async def test_a_body_that_is_too_long_for_the_server_is_refused(client: Client) -> None:
    body = io.BytesIO(b" " * (LARGEST_BODY + 1))
    async with client.session.post(f"{client.url}/completions", data=body) as response:
        assert response.status == 413


@pytest.mark.parametrize(("path", "status"), [("nowhere", 404), ("completions", 405)])
async def test_another_path_or_method_is_such_an_error(
    client: Client, path: str, status: int
) -> None:
    answered, reply = await client.get(path)
    assert answered == status and f"GET /v1/{path}" in reply["error"]["message"]


async def test_another_model_than_the_one_served_is_not_found(client: Client, llama: Path) -> None:
    status, reply = await client.post("completions", {"prompt": "a", "model": "gpt"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert llama.name in reply["error"]["message"]
    await client.completions(model=llama.name)


async def test_fields_at_the_value_that_changes_nothing_are_accepted(client: Client) -> None:
    plain = await client.chat(seed=2)
    zeros = {"presence_penalty": 0, "frequency_penalty": 0.0, "top_logprobs": 0, "logit_bias": {}}
    unknown = {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True}
    fields: dict[str, Any] = {**zeros, **unknown, "tools": None, "stop": None}
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
    alone = await client.completions(prompt=encoded(llama, "two"), **fields)
    assert [choice["text"] for choice in alone["choices"]] == wanted[2:]


async def test_a_chat_without_a_limit_may_use_what_is_left_of_the_context(client: Client) -> None:
    _, reply = await client.post("chat/completions", USER | {"regex": "a{1000}"})
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == SETTINGS.max_context


GRADE = r"<explanation>[^<]{0,20}</explanation>\s{0,2}<score>(\+1|0|-1)</score>"
YES: dict[str, Any] = {"type": "object", "properties": {"yes": {"type": "boolean"}}}
YES |= {"required": ["yes"], "additionalProperties": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": GRADE},
        {"guided_regex": GRADE},
        {"structured_outputs": {"regex": GRADE}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "y", "schema": YES}}},
        {"json_schema": json.dumps(YES)},
        {"guided_json": YES},
        {"structured_outputs": {"json": YES}},
    ],
    ids=str,
)
async def test_every_choice_matches_the_constraint(client: Client, fields: dict[str, Any]) -> None:
    reply = await client.chat(n=4, max_tokens=120, **fields)
    for choice in reply["choices"]:
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(GRADE, text) or type(json.loads(text)["yes"]) is bool


async def test_json_object_is_held_to_an_object(client: Client) -> None:
    reply = await client.chat(n=8, max_tokens=3, response_format={"type": "json_object"})
    assert all(choice["message"]["content"].startswith("{") for choice in reply["choices"])


def joined(chunks: list[dict[str, Any]], index: int) -> tuple[str, list[str]]:
    """Text and finish reasons of one choice."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    texts = [one["text"] if "text" in one else one["delta"].get("content", "") for one in own]
    return "".join(texts), [one["finish_reason"] for one in own if one["finish_reason"]]


@pytest.mark.parametrize("stop", [[], ["e", "no"], ["never to be seen"]])
async def test_a_streamed_chat_joined_is_the_whole_one(client: Client, stop: list[str]) -> None:
    asked = USER | {"n": 3, "seed": 4, "max_tokens": 60, "stop": stop}
    _, whole = await client.post("chat/completions", asked)
    chunks = await client.stream("chat/completions", asked)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for choice in whole["choices"]:
        text, reasons = joined(chunks, choice["index"])
        assert (text, reasons) == (choice["message"]["content"], [choice["finish_reason"]])
    assert "usage" not in chunks[-1]


async def test_a_streamed_completion_joined_is_the_whole_one_and_its_usage(client: Client) -> None:
    asked = {"prompt": ["a tree", "two"], "n": 2, "seed": 4, "max_tokens": 30, "logprobs": 0}
    whole = await client.completions(**asked)
    counted = asked | {"stream_options": {"include_usage": True}}
    *chunks, last = await client.stream("completions", counted)
    for choice in whole["choices"]:
        text, reasons = joined(chunks, choice["index"])
        assert (text, reasons) == (choice["text"], [choice["finish_reason"]])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_a_judge_reads_the_odds_of_answers_at_one_token(client: Client, llama: Path) -> None:
    """yes, no or maybe by their first letters, against a plain forward of transformers."""
    fields = {"regex": "yes|no|maybe", "temperature": 0.7, "max_tokens": 5}
    reply = await client.chat(**fields, logprobs=True, top_logprobs=20)
    first = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        row = model(torch.tensor([encoded(llama, "<|user|>hi<|assistant|>")])).logits[0, -1]
    letters = [encoded(llama, letter)[0] for letter in "ynm"]
    expected = dict(zip("ynm", (row[letters] / 0.7).log_softmax(-1).tolist(), strict=True))
    assert {entry["token"] for entry in first} == set(expected)
    for entry in first:
        assert abs(entry["logprob"] - expected[entry["token"]]) < GREATEST_DIFFERENCE
        assert entry["bytes"] == list(entry["token"].encode())
    likely = sorted(expected, key=lambda letter: -expected[letter])
    assert [entry["token"] for entry in first] == likely


@pytest.mark.parametrize("logprobs", [0, 1, 5])
async def test_a_completion_tells_the_most_probable_tokens(client: Client, logprobs: int) -> None:
    (choice,) = (await client.completions(seed=6, logprobs=logprobs, regex="[a-z]{8}"))["choices"]
    told = choice["logprobs"]
    if not logprobs:
        assert told["top_logprobs"] is None
        return
    sampled_is_extra = []
    columns = (told[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*columns, strict=True):
        assert top[token] == logprob
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert len(top) in (logprobs, logprobs + 1)
        sampled_is_extra.append(len(top) > logprobs)
    assert any(sampled_is_extra)


LIKELY = USER | {"logprobs": True}
TREE = {"prompt": "a tree"}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", LIKELY | {"top_logprobs": 4}),
        ("chat/completions", LIKELY | {"top_logprobs": 20, "top_k": 3, "stop": ["e", "no"]}),
        ("completions", TREE | {"logprobs": 5, "temperature": 0}),
        ("completions", TREE | {"logprobs": 3, "regex": "[ab]{4}"}),
    ],
)
async def test_streamed_top_logprobs_put_together_are_the_whole_ones(
    client: Client, path: str, asked: dict[str, Any]
) -> None:
    asked = asked | {"n": 2, "seed": 4, "max_tokens": 30}
    # from here on the prompt is cached, so both are computed by the same sums
    await client.post(path, asked)
    _, whole = await client.post(path, asked)
    chunks = await client.stream(path, asked)
    for choice in whole["choices"]:
        all_parts = [part for chunk in chunks for part in chunk["choices"]]
        parts = [part["logprobs"] for part in all_parts if part["index"] == choice["index"]]
        for field, wanted in choice["logprobs"].items():
            told = [entry for part in parts if part for entry in part[field] or []]
            assert told == (wanted or [])


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
