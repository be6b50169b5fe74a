"""Tool calls are read as each family writes them; whatever else stands there makes the reply
invalid."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coppice.common.dialogue import THOUGHT
from coppice.common.tool_calls import FAMILIES, Parsed, ToolCall, family_of, opening, parse

ONE = '{"name": "look", "arguments": {"a": "</x> é"}}'
CALL = ToolCall("look", '{"a": "</x> é"}')


@pytest.mark.parametrize(
    ("family", "reply", "expected"),
    [
        ("hermes", "Just text.", Parsed("Just text.")),
        ("hermes", f"I look.\n<tool_call>\n{ONE}\n</tool_call>", Parsed("I look.", [CALL])),
        (
            "hermes",
            f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>\n",
            Parsed("", [CALL, CALL]),
        ),
        (
            "llama3",
            '<|python_tag|>{"name": "look", "parameters": {"a": "</x> é"}}',
            Parsed("", [CALL]),
        ),
        ("mistral", f"Well.[TOOL_CALLS][{ONE}, {ONE}]", Parsed("Well.", [CALL, CALL])),
    ],
)
def test_calls_are_read_as_a_family_writes_them(family: str, reply: str, expected: Parsed) -> None:
    assert parse(reply, family, ["look"]) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_opening_begins_a_call_that_is_read(family: str) -> None:
    kind = FAMILIES[family]
    end = f' {{"a": 1}}}}{kind.closing}{kind.end}'
    one, several = opening(family, ["look é"]), opening(family, ["look é", "go"])
    assert parse(one + end, family, ["look é"]).calls == [ToolCall("look é", '{"a": 1}')]
    assert parse(f'{several} "go", "{kind.key}":{end}', family, ["look é", "go"]).calls == [
        ToolCall("go", '{"a": 1}')
    ]


def called(value: str) -> str:
    """A call with one argument."""
    return f'<tool_call>{{"name": "look", "arguments": {{"a": {value}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (f"<tool_call>{ONE}</tool_call> and more", "and nothing else there, got 'and more'"),
        (f"<tool_call>{ONE}", "nothing else there"),
        ("<tool_call>{}</tool_call>", 'expected an object of "name" and "arguments"'),
        ('<tool_call>{"name": "go", "arguments": {}}</tool_call>', "'go' was not offered"),
        ('<tool_call>{"name": "look", "arguments": "{}"}</tool_call>', "expected an object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "recursion"),
        (called(r'"\ud800"'), "surrogates not allowed"),
        (called("NaN"), "not JSON compliant"),
        (called("[" * 100 + "]" * 100), "nested more than"),
        ("<tool_call>", "without a call"),
        (f"[TOOL_CALLS][{ONE}] more", "nothing else there"),
        (f"[TOOL_CALLS][{ONE},]", "Expecting value"),
    ],
)
def test_an_unreadable_call_makes_the_reply_invalid_and_says_why(reply: str, problem: str) -> None:
    family = "mistral" if reply.startswith("[") else "hermes"
    parsed = parse(reply, family, ["look"])
    assert (parsed.text, parsed.calls) == (reply, [])
    assert problem in parsed.problem
    assert not parse(reply, family, []).problem, "without tools a mark is text"


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.text(),
    st.dictionaries(st.text(), st.integers() | st.text()),
)
def test_what_is_read_is_what_was_written(
    family: str, text: str, arguments: dict[str, object]
) -> None:
    kind = FAMILIES[family]
    written = json.dumps({"name": "look", kind.key: arguments})
    calls = {
        "hermes": f"<tool_call>{written}</tool_call>",
        "llama3": f"<|python_tag|>{written}",
        "mistral": f"[TOOL_CALLS][{written}]",
    }
    assume(THOUGHT not in text + calls[family])
    parsed = parse(text + calls[family], family, ["look"])
    assume(kind.mark not in text + calls[family][: len(kind.mark) - 1])
    assert (parsed.text, parsed.problem) == (text.rstrip(), "")
    assert [json.loads(call.arguments) for call in parsed.calls] == [arguments]


def test_the_family_is_that_of_the_template() -> None:
    templates = ("..<tool_call>..", "..<|python_tag|>..", "..[TOOL_CALLS][..", "none")
    assert [family_of(template) for template in templates] == [
        "hermes", "llama3", "mistral", "hermes"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "thought", ["<think> a <tool_call> b </think>", " a <tool_call> b </think>"]
)
def test_a_thought_is_neither_text_nor_calls(thought: str) -> None:
    parsed = parse(
        thought + ' 7 <tool_call>{"name": "look", "arguments": {}}</tool_call>', "hermes", ["look"]
    )
    assert (parsed.think, parsed.text, len(parsed.calls)) == ("a <tool_call> b", "7", 1)
