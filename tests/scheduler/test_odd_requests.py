"""An agent that ends because its request was answered 400 has no outcome, and the run goes on."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from coppice.scheduler.config import EvaluationConfig, SchedulerConfig
from coppice.scheduler.growth.strategies import chain, full
from coppice.scheduler.ledger.journal import Journal
from coppice.wire.faults import DataFault
from tests.agent_stage import THINKING, Stages
from tests.scheduler.test_begin import QUESTIONS, UPDATES, House, journal_of

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

def mortal(task):
    """Dies of an odd request after its first reply, if its task is odd."""
    call([user("go")])
    if "odd" in task["question"]:
        post("/chat/completions", REFUSED)
    return 1.0

def refused_at_once(task):
    post("/chat/completions", REFUSED)
'''


async def run_of(folder: Path, llama: Path, agent: str) -> Journal:
    """The journal of a whole run of an agent, with an odd task among its tasks and among the
    held-out ones."""
    model = folder / "model"
    shutil.copytree(llama, model)
    (model / "chat_template.jinja").write_text(CHAT.replace("<|im_end|>", "</s>"))
    questions = {"train": ["odd", "plain", "plainer"], "heldout": ["odd as well", "plain as well"]}
    for name, texts in questions.items():
        rows = [{"id": text, "question": text, "golden_answers": ["7"]} for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape: Any = {"updates": UPDATES, "questions_per_update": QUESTIONS, "max_action_tokens": 4}
    evaluation = EvaluationConfig(questions=2)
    settings = SchedulerConfig(strategy="chain", judge="none", evaluation=evaluation, **shape)
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "heldout")}
    more: dict[str, Any] = {"options": {"run": f"agents_of_a_test:{agent}"}, **files}
    house = House(folder / "run", model, environment="agent", scheduler=settings, **more)
    await house.live(until=lambda house: False)
    return journal_of(folder / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("agents")
async def test_a_task_whose_agent_dies_of_a_400_is_replaced(tmp_path: Path, llama: Path) -> None:
    journal = await run_of(tmp_path, llama, "mortal")
    rows = journal.trees("split='train'")
    odd = [row for row in rows if row.task == "odd"]
    assert odd and {row.status for row in odd} == {"quarantined"}
    for reason in (str(row.reason) for row in odd):
        assert reason.startswith("no trajectory could be trained, because an episode was dropped")
        assert "the agent ended after" in reason and "roles must alternate" in reason
    assert [row.status for row in rows].count("closed") == QUESTIONS * UPDATES
    for _, _, result in journal.evaluations():
        measures: Any = result["measures"]
        assert (result["questions"], measures["return"]["mean"]) == (2, 1.0)
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert max(record.get("count/refused_episodes", 0) for record in records) >= 1


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
