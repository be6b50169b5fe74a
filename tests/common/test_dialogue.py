"""Equal conversations have equal digests however they are written, and what follows a reply is what
the whole rendering has there."""

import json
from pathlib import Path
from typing import Any

import pytest

from coppice.common.dialogue import DEEPEST, ChatTemplate, Renderer, arguments, histories
from tests.agent_stage import TEMPLATE, THINKING

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def renderer(folder: Path, source: str) -> Renderer:
    (folder / "chat_template.jinja").write_text(source)
    return Renderer(ChatTemplate(folder))


def call(name: str, written: Any, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": written}}


ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("look", '{"a": 1, "b": [2]}', "call_1"), call("look", "{}", "x")],
    },
    {"role": "tool", "tool_call_id": "x", "content": "second"},
    {"role": "tool", "tool_call_id": "call_1", "content": "first"},
]


@pytest.mark.parametrize(
    ("sampled", "sent", "equal"),
    [
        ('{"a": 1.0}', '{"a":1}', True),
        ('{"a": [2, -0.0, 1e3]}', {"a": [2.0, 0, 1000]}, True),
        # what JavaScript makes of it
        ('{"a": 12345678901234567890}', '{"a":12345678901234567000}', True),
        ('{"a": 1}', '{"a":"1"}', False),
        ('{"a": 1}', '{"a":true}', False),
        ('{"a": 1}', '{"a":1.5}', False),
        ('{"a": 1%s}' % ("0" * 400), '{"a": 2%s}' % ("0" * 400), False),
    ],
)
def test_equal_numbers_are_equal_arguments(sampled: str, sent: Any, equal: bool) -> None:
    one, other = (
        [{"role": "assistant", "content": "", "tool_calls": [call("f", a, "c")]}]
        for a in (sampled, sent)
    )
    assert (histories(one) == histories(other)) == equal


def test_a_history_is_known_again_however_a_client_has_written_it() -> None:
    def text(part: str) -> dict[str, str]:
        return {"type": "text", "text": part}

    written_again: list[dict[str, Any]] = [
        {"role": "system", "content": [text("Be "), text("brief.")], "name": "s"},
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant", "content": "", "refusal": None, "reasoning_content": "hm",
            "provider_specific_fields": {},
            "tool_calls": [call("look", '{"b":[2],"a":1}', "c9"), call("look", {}, "y")],
        },
        {"role": "tool", "tool_call_id": "y", "content": "second", "name": "look"},
        {"role": "tool", "tool_call_id": "c9", "content": [text("first")]},
    ]  # fmt: skip
    assert histories(ASKED, TOOLS) == histories(written_again, TOOLS)


LOOK = call("look", '{"a": 1, "b": [2]}', "call_1")
OTHER = call("look", '{"a": 1, "b": [3]}', "call_1")
CHANGES: list[tuple[int, dict[str, Any]]] = [
    (0, {"content": "Be brief. "}),
    (1, {"role": "system"}),
    (2, {"content": "text"}),
    (2, {"tool_calls": [OTHER, call("look", "{}", "x")]}),
    (2, {"tool_calls": [LOOK]}),
    (3, {"tool_call_id": "call_1"}),
    (4, {"content": "First"}),
]


@pytest.mark.parametrize(("place", "change"), CHANGES)
def test_digests_differ_from_the_first_difference_on(place: int, change: dict[str, Any]) -> None:
    other = [message | change if i == place else message for i, message in enumerate(ASKED)]
    same = [a == b for a, b in zip(histories(ASKED, TOOLS), histories(other, TOOLS), strict=True)]
    assert same == [True] * (place + 1) + [False] * (len(ASKED) - place)
    assert not set(histories(ASKED)) & set(histories(ASKED, TOOLS)), "the tools are part of it"


def test_a_reply_is_known_without_its_thoughts_and_an_other_question_is_not() -> None:
    def said(role: str, text: str) -> str:
        return histories([{"role": "user", "content": "?"}, {"role": role, "content": text}])[-1]

    written = ["<think>\nHm.\n</think>\n\n42", "Hm.</think>42", "42", "\n42 "]
    assert len({said("assistant", text) for text in written}) == 1
    assert len({said("user", text) for text in written}) == len(written)


@pytest.mark.parametrize("source", [THINKING, TEMPLATE], ids=["with tools", "without tools"])
def test_after_a_reply_stands_what_the_whole_rendering_has(tmp_path: Path, source: str) -> None:
    rendered = renderer(tmp_path, source)
    reply = "I look.\n"
    history = [*ASKED[:2], {"role": "assistant", "content": reply}]
    prompt = rendered.whole(history[:2], TOOLS)
    for tail in ([{"role": "user", "content": "And?"}], ASKED[3:]):
        whole = rendered.whole([*history, *tail], TOOLS)
        assert whole == prompt + reply + rendered.after(tail)


def test_a_template_without_tools_gets_them_as_text(tmp_path: Path) -> None:
    text = renderer(tmp_path, TEMPLATE).whole(ASKED, TOOLS)
    first = text.split("<|im_end|>")[0]
    assert json.dumps(TOOLS[0]) in first and "Be brief." in first
    assert '<tool_call>\n{"name": "look", "arguments": {"a": 1, "b": [2]}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nsecond\n</tool_response><|im_end|>" in text
    assert "<|im_start|>system" in renderer(tmp_path, TEMPLATE).whole(ASKED[1:2], TOOLS)


def test_a_template_that_changes_replies_is_refused(tmp_path: Path) -> None:
    changed = renderer(tmp_path, TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }}"))
    with pytest.raises(ValueError, match="does not write replies as they are"):
        changed.after(ASKED[:1])


@pytest.mark.parametrize("deep", [DEEPEST + 1, 5_000, 500_000])
def test_arguments_that_are_nested_too_deep_are_refused_wherever_they_are_read(deep: int) -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": "[" * deep + "]" * deep}}
    with pytest.raises(ValueError, match=f"nested more than {DEEPEST} deep"):
        histories([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert arguments("[" * DEEPEST + "]" * DEEPEST) != ""
