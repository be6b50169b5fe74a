"""The OpenAI-compatible server over a real engine and real sockets: answers in the protocol's shape, refusals that say why."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tokenizers
from aiohttp import web

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from actors.openai_server import Server, runner
from tests import tiny
from wire.messages import GenerateRequest, Sampling, ScoreRequest

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

    async def completions(self, **fields: Any) -> Any:
        """A completion that must succeed."""
        status, reply = await self.post("completions", {"prompt": "a tree", "max_tokens": 8, **fields})
        assert status == 200, reply
        return reply


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Client]:
    engine = LocalEngine(str(folder), SETTINGS)
    await engine.start()
    made = runner(Server(engine, folder))
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


def encoded(folder: Path, text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


async def test_models_lists_the_one_model_served(client: Client, llama: Path) -> None:
    async with client.session.get(f"{client.url}/models") as response:
        listed = await response.json()
    assert [(m["id"], m["object"]) for m in listed["data"]] == [(llama.name, "model")]


async def test_a_chat_is_the_completion_of_its_rendered_template(client: Client, llama: Path) -> None:
    greedy = {"max_tokens": 12, "temperature": 0}
    status, chat = await client.post("chat/completions", USER | greedy)
    plain = await client.completions(prompt="<|user|>hi<|assistant|>", **greedy)
    assert status == 200
    assert chat["object"] == "chat.completion"
    assert plain["object"] == "text_completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
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


async def test_a_repeated_prompt_reports_its_cached_tokens(client: Client) -> None:
    first, second = [await client.completions() for _ in range(2)]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # The last token's logits are computed anew.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


async def test_a_seed_reproduces_and_another_seed_differs(client: Client) -> None:
    texts = [(await client.completions(seed=seed, max_tokens=24))["choices"][0]["text"] for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


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
    whole = np.concatenate([prompt, same.samples[0].tokens])
    scored = (await client.engine.score(ScoreRequest(whole))).logprobs[len(prompt) :]
    assert len(choice["logprobs"]["tokens"]) == len(scored)
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], scored, atol=GREATEST_DIFFERENCE)


async def test_chat_logprobs_spell_the_reply_byte_by_byte(client: Client) -> None:
    asked = USER | {"logprobs": True, "max_tokens": 8, "seed": 6}
    _, reply = await client.post("chat/completions", asked)
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    assert all(entry["logprob"] <= 0 for entry in content)
    assert "logprobs" not in (await client.post("chat/completions", asked | {"logprobs": False}))[1]["choices"][0]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("completions", b"{not json", "JSON"),
        ("completions", b'{"prompt": "\xff"}', "utf"),
        ("completions", {"max_tokens": 4}, "prompt"),
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": ""}, "prompt of 0 tokens"),
        ("completions", {"prompt": "a", "n": 9}, "max_batch"),
        ("completions", {"prompt": "a", "max_tokens": 9999}, "max_context"),
        ("completions", {"prompt": "a", "max_tokens": "4"}, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "temperature": 1e-300}, "temperature"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "a", "top_p": 1.5}, "top_p"),
        ("completions", {"prompt": "a", "stop": ""}, "stop"),
        ("completions", {"prompt": "a", "stream": True}, "stream"),
        ("completions", {"prompt": "a", "best_of": 4}, "best_of"),
        ("completions", {"prompt": "a", "logprobs": 5}, "logprobs"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "content"),
        ("chat/completions", {"messages": "hi"}, "messages"),
        ("chat/completions", USER | {"top_logprobs": 3}, "top_logprobs"),
    ],
)
async def test_a_request_that_cannot_be_served_is_400_with_the_reason(
    client: Client, path: str, body: dict[str, Any] | bytes, reason: str
) -> None:
    status, reply = await client.post(path, body)
    assert status == 400
    assert reply["error"]["type"] == "invalid_request_error"
    assert reason in reply["error"]["message"]
    assert client.engine.counts["decoded_tokens"] == 0


async def test_a_template_that_refuses_a_conversation_is_400_with_its_reason(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "strict")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    async with serving(folder) as client:
        status, reply = await client.post("chat/completions", USER)
        assert (status, reply["error"]["message"]) == (400, "roles must alternate")


async def test_a_template_sees_the_special_tokens_and_may_live_in_the_tokenizer_settings(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "inline")
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    async with serving(folder) as client:
        _, reply = await client.post("chat/completions", USER | {"max_tokens": 1})
        assert reply["usage"]["prompt_tokens"] == 1 + len(encoded(folder, "hi"))  # "<s>" is one token


async def test_a_client_that_hangs_up_frees_its_samples(client: Client) -> None:
    fields = {"prompt": "a", "n": 8, "max_tokens": 250, "temperature": 0}
    whole = (await client.completions(**fields))["usage"]["completion_tokens"]
    pending = asyncio.create_task(client.post("completions", fields))
    while client.engine.counts["decoded_tokens"] == whole:
        await asyncio.sleep(0)
    pending.cancel()
    await asyncio.wait([pending])
    await client.completions(n=8, max_tokens=1)  # needs every sample slot
    assert client.engine.counts["decoded_tokens"] - whole < whole


async def test_a_body_that_is_too_long_for_the_server_is_refused(client: Client) -> None:
    async with client.session.post(f"{client.url}/completions", data=b" " * (2 << 20)) as response:
        assert response.status == 413


async def test_every_response_has_an_id_of_its_own(client: Client) -> None:
    names = {(await client.completions())["id"] for _ in range(3)}
    assert len(names) == 3
