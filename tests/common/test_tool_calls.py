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


HERMES = f"<tool_call>{ONE}</tool_call>"
BARE = ONE.replace("arguments", "parameters")
WRITTEN = [
    ("hermes", "Just text.", Parsed("Just text.")),
    ("hermes", f"{HERMES}\n{HERMES}\n", Parsed("", [CALL, CALL])),
    ("llama3", BARE, Parsed("", [CALL])),
    ("llama3", f"<|python_tag|>{BARE}; {BARE}", Parsed("", [CALL, CALL])),
    ("llama3", '{"names": 1}', Parsed('{"names": 1}')),
    ("llama3", '{"name": "Ada", "born": 1815}', Parsed('{"name": "Ada", "born": 1815}')),
    ("mistral", f"Well.[TOOL_CALLS][{ONE}, {ONE}]", Parsed("Well.", [CALL, CALL])),
]


@pytest.mark.parametrize(("family", "reply", "expected"), WRITTEN)
def test_calls_are_read_as_a_family_writes_them(family: str, reply: str, expected: Parsed) -> None:
    assert parse(reply, family, ["look"]) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_opening_begins_a_call_that_is_read(family: str) -> None:
    kind = FAMILIES[family]
    end = f' {{"a": 1}}}}{kind.closing}{kind.end}'
    one, several = opening(family, ["look é"]), opening(family, ["look é", "go"])
    assert parse(one + end, family, ["look é"]).calls == [ToolCall("look é", '{"a": 1}')]
    parsed = parse(f'{several} "go", "{kind.key}":{end}', family, ["look é", "go"])
    assert parsed.calls == [ToolCall("go", '{"a": 1}')]


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
        (ONE, 'expected an object of "name" and "parameters"'),
        (f"[TOOL_CALLS][{ONE},]", "Expecting value"),
    ],
)
def test_an_unreadable_call_makes_the_reply_invalid_and_says_why(reply: str, problem: str) -> None:
    family = {"[": "mistral", "{": "llama3"}.get(reply[0], "hermes")
    parsed = parse(reply, family, ["look"])
    assert (parsed.text, parsed.calls) == (reply, [])
    assert problem in parsed.problem
    assert not parse(reply, family, []).problem, "without tools a mark is text"


ARGUMENTS = st.dictionaries(st.text(), st.integers() | st.text())


@given(st.sampled_from(sorted(FAMILIES)), st.text(), ARGUMENTS)
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
    marks = {"<tool_call>": "hermes", "<|python_tag|>": "llama3", "[TOOL_CALLS][": "mistral"}
    for mark, family in {**marks, "none": "hermes"}.items():
        assert family_of(f"..{mark}..") == family


@pytest.mark.parametrize("begin", ["<think>", ""])
def test_a_thought_is_neither_text_nor_calls(begin: str) -> None:
    parsed = parse(f"{begin} a <tool_call> b </think> 7 {HERMES}", "hermes", ["look"])
    assert (parsed.think, parsed.text, len(parsed.calls)) == ("a <tool_call> b", "7", 1)
