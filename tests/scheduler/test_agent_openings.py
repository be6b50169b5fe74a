"""Required calls that the run opens: the opening is in the tree, is no sample, and what follows it
has the policy's own log-probabilities."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.common.support import decode
from coppice.scheduler.growth import rollouts
from coppice.scheduler.growth.strategies import chain
from coppice.scheduler.growth.tree import Fork, Node
from coppice.tools.evaluating.in_process import InProcess
from tests.agent_stage import Stage, Stages

AGENTS = '''

def requiring(task):
    """Requires a call of one tool, then of one of two, then no call."""
    messages, called = [user("go")], 0
    named = {"type": "function", "function": {"name": "add"}}
    for wanted, choice in (("add", named), ("look", "required"), ("add", "auto")):
        reply = call(messages, "add", "look", tool_choice=choice)
        calls = reply.get("tool_calls") or []
        called += [one["function"]["name"] for one in calls] == [wanted]
        messages.append(reply)
        for one in calls:
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": "seen"})
        if not calls:
            messages.append(user("on"))
    return called / 2
'''
NAMED = '<tool_call>\n{"name": "add", "arguments":'
ANY = '<tool_call>\n{"name":'


@pytest.fixture
def stage(stage: Stages) -> Stages:
    """Makes stages whose runs open calls."""

    return lambda reply, **options: stage(reply, "requiring", **{"open_calls": True, **options})


def goes_on(prompt: str, i: int) -> str:
    """Completes what the run has opened."""
    if prompt.endswith(NAMED):
        return ' {"a": 1}}\n</tool_call>'
    return ' "look", "arguments": {}}\n</tool_call>' if prompt.endswith(ANY) else "done"


def holds(s: Stage, action: Node, opening: str) -> None:
    """An action is the opening and the sample after it, below exactly the tokens that the policy
    was given before both."""
    given, above = s.text.encode(opening), s.tree.parent(action)
    assert above is not None and action.text.startswith(opening)
    after = action.tokens[len(given) :].tolist()
    number = next(i for i, one in enumerate(s.policy.samples) if one.tokens.tolist() == after)
    sample, read = s.policy.samples[number], np.concatenate([s.tree.prefix(above), given])
    np.testing.assert_array_equal(read, s.policy.asked[number])
    expected = {
        "tokens": [*given, *sample.tokens],
        "sampled": [False] * len(given) + [True] * len(after),
        "logprobs": np.float32([0] * len(given) + sample.logprobs.tolist()),
        "versions": np.zeros(len(action.tokens)),
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(action, name), values)


async def test_a_required_call_is_opened_and_the_agent_receives_it_whole(stage: Stages) -> None:
    s = stage(goes_on)
    tree = await s.grow(chain)
    actions = tree.actions()
    assert [action.scores["valid"] for action in actions] == [1, 1, 1]
    assert actions[-1].scores["outcome"] == 1.0
    assert tree.path(actions[2])[2::2] == actions, "each call was known again in the next request"
    for action, opening in zip(actions, (NAMED, ANY, ""), strict=True):
        holds(s, action, opening)


@pytest.mark.parametrize(
    ("reply", "valid", "called"),
    [
        ('<tool_call>{"name": "look", "arguments": {}}</tool_call>', [0, 1, 1], 0.5),
        ("I would rather not.", [0, 0, 1], 0.0),
    ],
)
async def test_a_required_call_that_is_not_made_is_an_invalid_action_which_the_agent_receives(
    stage: Stages, reply: str, valid: list[int], called: float
) -> None:
    tree = await stage(lambda prompt, i: reply, open_calls=False).grow(chain)
    assert [action.scores["valid"] for action in tree.actions()] == valid
    assert tree.actions()[-1].scores["outcome"] == called


async def test_a_fork_and_a_continuation_keep_the_opening(stage: Stages) -> None:
    s = stage(goes_on)
    tree = await s.grow(chain)
    context = s.anew(tree, 2)
    await context.plant()
    first = tree.actions()[0]
    given = len(s.text.encode(NAMED))
    for kept in (0, 2, given + 1):
        fork = await context.branch(Fork(first, kept), 1)
        assert fork.sampled is not None and fork.logprobs is not None
        assert len(fork.tokens) == len(fork.sampled) == len(fork.logprobs)
        assert int((~fork.sampled).sum()) == given and not fork.sampled[:given].any()
        same = slice(max(kept, given))
        np.testing.assert_array_equal(fork.tokens[same], first.tokens[same])
    asked, before = len(s.policy.prompts), rollouts.position_before(context, first)
    assert await rollouts.outcomes(context, before, 2) == [1.0, 1.0]
    assert [prompt.endswith(NAMED) for prompt in s.policy.prompts[asked:]] == [True, False, False]
    assert s.policy.prompts[asked + 1].endswith(ANY)


async def test_what_an_engine_samples_after_an_opening_has_its_support(
    stage: Stages, llama: Path
) -> None:
    engine = LocalEngine(str(llama), ActorsConfig(dtype="float32", max_context=2048))
    s, services = stage(goes_on), InProcess(engine, [])
    await services.start()
    try:
        changes: Any = {"judge": "none", "max_action_tokens": 60, "top_p": 0.9}
        settings = msgspec.structs.replace(s.settings, **changes)
        s.runtime = msgspec.structs.replace(s.runtime, dispatcher=services, settings=settings)
        context = s.anew()
        context.services.top = 3
        await context.plant()
        (action,) = await context.generate(await context.tip(), 1)
        given = len(s.text.encode(NAMED))
        assert action.logprobs is not None and action.entropies is not None
        assert len(action.entropies) == len(action.tokens) == 60
        left = decode(action.support, len(action.tokens))
        assert left is not None and not left.counts[:given].any() and left.counts[given:].all()
        assert left.has(action.tokens).all()
    finally:
        await services.close()
