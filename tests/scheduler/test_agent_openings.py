"""Required calls that the run opens: the opening is in the tree, is no sample, and what follows it
has the policy's own log-probabilities."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.common.support import decode
from coppice.learner.update.table import build
from coppice.scheduler.growth import rollouts
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.strategies import chain, full
from coppice.scheduler.growth.tree import Fork, Node
from coppice.tools.evaluating.in_process import InProcess
from coppice.wire.messages import Constraint, GenerateRequest, Sampling, TrainGroup
from tests.agent_stage import Stage

AGENTS = '''
import json, os, urllib.request

def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

def requiring(task):
    """Requires a call of one tool, then of one of two, then no call."""
    messages, called = [{"role": "user", "content": "go"}], 0
    for tools, choice in ((["add"], {"type": "function", "function": {"name": "add"}}), (["add", "look"], "required"), (["add"], "auto")):
        body = {"model": "m", "messages": messages, "tools": [tool(name) for name in ("add", "look")], "tool_choice": choice, **(task["golds"] and json.loads(task["golds"][0]))}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
        reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        calls = reply.get("tool_calls") or []
        called += [call["function"]["name"] for call in calls] == [tools[-1]]
        messages += [reply, *({"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls)]
        if not calls:
            messages.append({"role": "user", "content": "on"})
    return called / 2
'''
NAMED = '<tool_call>\n{"name": "add", "arguments":'
ANY = '<tool_call>\n{"name":'


@pytest.fixture
def stage(stage: Callable[..., Stage]) -> Callable[..., Stage]:
    """Makes stages whose runs open calls."""

    def make(reply: Callable[[str, int], str], **options: Any) -> Stage:
        made = stage(reply, "requiring", **{"open_calls": True, **options})
        made.task = msgspec.structs.replace(made.task, golds=["{}"])
        return made

    return make


def goes_on(prompt: str, i: int) -> str:
    """Completes what the run has opened."""
    if prompt.endswith(NAMED):
        return ' {"a": 1}}\n</tool_call>'
    return ' "look", "arguments": {}}\n</tool_call>' if prompt.endswith(ANY) else "done"


def holds(s: Stage, action: Node, opening: str) -> None:
    """An action is the opening and the sample after it, below exactly the tokens that the policy
    was given before both."""
    number = next(i for i, sample in enumerate(s.policy.samples) if action.tokens.tolist()[-len(sample.tokens) :] == sample.tokens.tolist())  # fmt: skip
    sample, given, above = s.policy.samples[number], s.text.encode(opening), s.tree.parent(action)
    assert above is not None and action.logprobs is not None and action.versions is not None
    assert action.sampled is not None
    assert action.text.startswith(opening)
    np.testing.assert_array_equal(action.tokens, [*given, *sample.tokens])
    np.testing.assert_array_equal(
        np.concatenate([s.tree.prefix(above), given]), s.policy.asked[number]
    )
    np.testing.assert_array_equal(
        action.sampled, [False] * len(given) + [True] * len(sample.tokens)
    )
    np.testing.assert_array_equal(
        action.logprobs, np.float32([0] * len(given) + sample.logprobs.tolist())
    )
    np.testing.assert_array_equal(action.versions, np.zeros(len(action.tokens)))


async def test_a_required_call_is_opened_and_the_agent_receives_it_whole(
    stage: Callable[..., Stage],
) -> None:
    s = stage(goes_on)
    tree = await s.grow(chain)
    actions = tree.actions()
    assert [action.scores["valid"] for action in actions] == [1, 1, 1]
    assert actions[-1].scores["outcome"] == 1.0
    assert tree.path(actions[2])[2::2] == actions, "each call was known again in the next request"
    for action, opening in zip(actions, (NAMED, ANY, ""), strict=True):
        holds(s, action, opening)


async def test_an_opening_is_not_trained_and_what_follows_is(stage: Callable[..., Stage]) -> None:
    s = stage(goes_on)
    tree = await s.grow(full, k=2)
    nodes = [node.travels({}) for node in tree.nodes.values()]
    group = TrainGroup(0, 0, nodes, s.groups[0])
    tokens = build([group], {(0, node.id): node for node in nodes}).paths
    opened = len(s.text.encode(NAMED)), len(s.text.encode(ANY)), 0
    assert [int((~turn.sampled).sum()) for turn in tokens] == [*opened, *opened]
    assert all(turn.sampled[-1] for turn in tokens)


async def test_a_fork_keeps_the_opening_and_so_do_continuations_outside_the_tree(
    stage: Callable[..., Stage],
) -> None:
    s = stage(goes_on)
    tree = await s.grow(chain)
    context = Context(s.runtime, s.task, tree, random.Random(2))
    await context.plant()
    first = tree.actions()[0]
    given = len(s.text.encode(NAMED))
    for kept in (0, 2, given + 1):
        fork = await context.branch(Fork(first, kept), 1)
        assert fork.sampled is not None and fork.logprobs is not None
        assert len(fork.tokens) == len(fork.sampled) == len(fork.logprobs)
        assert int((~fork.sampled).sum()) == given and not fork.sampled[:given].any()
        np.testing.assert_array_equal(
            fork.tokens[: max(kept, given)], first.tokens[: max(kept, given)]
        )
    asked = len(s.policy.prompts)
    assert await rollouts.outcomes(context, rollouts.position_before(context, first), 2) == [
        1.0,
        1.0,
    ]
    assert [prompt.endswith(NAMED) for prompt in s.policy.prompts[asked:]] == [True, False, False]
    assert s.policy.prompts[asked + 1].endswith(ANY)


async def test_samples_after_an_opening_have_the_log_probabilities_of_the_whole_distribution(
    stage: Callable[..., Stage], llama: Path
) -> None:
    """So the importance ratio is 1 while the weights are the same. Under a grammar that forces the
    same text it would not be."""
    engine = LocalEngine(str(llama), ActorsConfig(dtype="float32", max_context=2048))
    s, services = stage(goes_on), InProcess(engine, [])
    await services.start()
    try:
        settings = msgspec.structs.replace(
            s.settings, judge="none", max_action_tokens=60, top_p=0.9
        )
        s.runtime = msgspec.structs.replace(s.runtime, dispatcher=services, settings=settings)
        context = Context(s.runtime, s.task, s.tree, random.Random(1))
        context.services.top = 3
        await context.plant()
        place = await context.tip()
        (action,) = await context.generate(place, 1)
        given = len(s.text.encode(NAMED))
        assert (
            action.sampled is not None
            and action.logprobs is not None
            and action.entropies is not None
        )
        assert len(action.entropies) == len(action.tokens) == 60
        left = decode(action.support, len(action.tokens))
        assert left is not None and not left.counts[:given].any() and left.counts[given:].all()
        assert left.has(action.tokens).all()
        rows = np.split(left.ids, np.cumsum(left.counts)[:-1])
        whole = await forward(llama, s.tree.prefix(place), action.tokens)
        for at in range(given, len(action.tokens)):
            among = whole[at, rows[at]].log_softmax(-1)
            assert (
                abs(float(among[list(rows[at]).index(action.tokens[at])]) - action.logprobs[at])
                < 1e-3
            )
        forced = Sampling(
            60,
            constraint=Constraint("regex", r'<tool_call>\n\{"name": "add", "arguments": [a-z]{2}'),
        )
        (sample,) = (
            await engine.generate(GenerateRequest(s.tree.prefix(place), 1, forced))
        ).samples
        plain = (await forward(llama, s.tree.prefix(place), sample.tokens)).log_softmax(-1)
        gap = sample.logprobs - plain[range(len(sample.tokens)), sample.tokens.tolist()].numpy()
        assert gap.max() > 1, "a grammar's log-probabilities are those of the masked distribution"
    finally:
        await services.close()


async def forward(folder: Path, prefix: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """The logits at each token after a prefix, from a plain forward, float32 [tokens, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([[*prefix.tolist(), *tokens.tolist()]])).logits[0]
    return scores[len(prefix) - 1 : -1]
