"""An agent that ends because its request was answered 400 has no outcome."""

import re

import pytest

from coppice.scheduler.growth.strategies import chain, full
from coppice.wire.faults import DataFault
from tests.agent_stage import THINKING, Stages

CHAT = (
    "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + THINKING
)
AGENTS = '''
REFUSED = {"messages": [user("one"), user("two")]}

def dying(task):
    """Dies of an odd request, if it is told something bad."""
    if call([user("go")])["content"] == "bad":
        post("/chat/completions", REFUSED)
    return 1.0

def refused_at_once(task):
    post("/chat/completions", REFUSED)
'''


async def test_an_agent_that_dies_of_a_refusal_has_no_outcome_and_the_others_of_its_group_do(
    stage: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = iter(["bad", "good", "bad", "good"])
    s = stage(lambda prompt, i: next(replies), "dying")
    tree = await s.grow(full, k=4)
    (group,) = s.groups
    trained = [(tree.nodes[turn.node].text[:4], turn.scores["outcome"]) for turn in group]
    assert trained == [("good", 1.0)] * 2
    bad = [node for node in tree.nodes.values() if node.text.startswith("bad")]
    assert len(bad) == 2
    for node in bad:
        assert not {"outcome", "crashed"} & set(node.scores)
        assert re.search("400: .*roles must alternate", node.notes["dropped"])
    assert s.counts["refused_episodes"] == 2
    said = capsys.readouterr().out
    assert said.count("an agent's request fails: ") == 1 and "roles must alternate" in said


async def test_a_refusal_of_the_first_request_is_in_the_tasks_fault(stage: Stages) -> None:
    with pytest.raises(
        DataFault, match=r"ended before it asked the policy .* answered 400: .*roles must alternate"
    ):
        await stage(lambda prompt, i: "r", "refused_at_once").grow(chain)
