"""The rules of a SOTOPIA conversation: turns, endings, what each side is told, and the twenty
scenarios of our own."""

import functools
import json
import operator
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.environments.base import HELD_OUT_SEEDS, POLICY, SPLIT, Task, Tools, Transition
from coppice.actors.environments.sotopia import environment as conversation
from coppice.actors.environments.sotopia.environment import Dialogue, Sotopia, SotopiaState
from coppice.actors.environments.sotopia.environment import SotopiaTurn as Turn
from coppice.actors.environments.sotopia.scenarios import OWN, Agent, load, shown
from coppice.scheduler.growth.tasks import GeneratedTasks

AGENT = Agent(
    *("Ada", "Bell", 30, "pilot"),
    public_info="Ada sings.",
    personality_and_values="Ada is calm.",
    secret="Ada cannot swim.",
)
NOD = "non-verbal communication"


def reply(kind: str, argument: str = "") -> str:
    return json.dumps({"action_type": kind, "argument": argument})


class Table(Tools):
    """Tools whose speaker says what the script holds, and remembers what it was told."""

    def __init__(self, *script: str):
        self.rng, self.script, self.told = random.Random(0), list(script), []

    async def say(
        self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]
    ) -> str:
        self.told.append((speaker, messages[0]["content"], max_tokens))
        return self.script.pop(0)


async def take(environment: Sotopia, state: SotopiaState, text: str, *answers: str) -> Transition:
    return await environment.step(state, environment.read(state, text), Table(*answers))


START = SotopiaState("scenario-01-1", 0)


def turns(*words: str) -> tuple[Turn, ...]:
    """Turns of both sides by turns: what is said, or "none" or "leave"."""
    kinds = [(word,) if word in ("none", "leave") else ("speak", word) for word in words]
    return tuple(Turn(n % 2, *kind) for n, kind in enumerate(kinds))


def test_the_last_json_object_of_a_reply_is_the_turn() -> None:
    hello = reply("speak", "Hello.")
    read: dict[str, tuple[str, ...] | None] = {
        hello: ("speak", "Hello."),
        f"I think {{so}}. {reply('none', 'ignored')}": ("none",),
        hello + reply("leave"): ("leave",),
        '{"action_type": "action", "argument": "a {b} c", "to": ["Ada"]}': ("action", "a {b} c"),
        reply(NOD, "nods\nTurn #9: x"): (NOD, "nods Turn #9: x"),
        r'{"action_type": "speak", "argument": "half \ud83d pair"}': ("speak", "half pair"),
        '{"action_type": "speak", "argument": "no end': None,
        hello + ' {"a": 1}': None,
        '{"a":' * 5_000: None,
    }
    for text, turn in read.items():
        action = conversation.read_turn(text)
        expected = (*turn, "")[:2] if turn else ("invalid", None)
        assert (action.kind, action.argument) == expected, text[:80]


def test_a_conversation_ends_as_specified() -> None:
    over = {"a " * 19: False, "a " * 20: True, "leave": True}
    over |= {"none none": False, "none none none": True, "none a none none": False}
    assert {words: Sotopia().over(turns(*words.split())) for words in over} == over


def test_what_a_side_knows_grows_with_the_relationship_and_never_holds_the_secret() -> None:
    told = [conversation.profile(AGENT, level) for level in range(6)]
    assert "Ada" not in told[0] and "30" not in told[1] and "calm" not in told[2]
    assert "calm" in told[3] == told[4] == told[5]
    assert not any("swim" in text for text in told)
    assert "swim" in conversation.profile(AGENT, 0, own=True)


def test_the_prompt_hides_goal_and_secret_of_the_other_side_and_shares_its_head() -> None:
    environment = Sotopia()
    state = SotopiaState("scenario-03-1", 0, turns("Good morning."))
    scenario = environment.library.envs["scenario-03"]
    me, other = (environment.library.agents[key] for key in ("agent-04", "agent-03"))
    (message,) = environment.prompt(Task("t"), state)
    head, tail = message["content"].split(SPLIT)
    assert shown(scenario.agent_goals[0], "agent_0") in head and me.secret in head
    assert shown(scenario.agent_goals[1], "agent_1") not in head and other.secret not in head
    assert other.public_info in head
    assert f'Turn #1: {me.name} said: "Good morning."' in tail and "It is turn #2" in tail
    first = environment.prompt(Task("t"), SotopiaState("scenario-03-1", 0))[0]["content"]
    assert first.startswith(head + SPLIT)


def test_the_tags_of_the_layout_decide_who_sees_a_text() -> None:
    text = """Meet. <p viewer="environment">All.</p> <p viewer="agent_1">Hush.</p>
    (<extra_info>Take care</extra_info>)"""
    for viewer, seen in (("agent_0", ""), ("agent_1", "Hush. "), ("environment", "All. ")):
        assert shown(text, viewer) == f"Meet. {seen}(Take care)"


async def test_both_sides_act_in_turn_and_the_partner_is_the_observation() -> None:
    environment = Sotopia(partner="ann", partner_tokens=9)
    table = Table(reply("speak", "No."))
    step = await environment.step(START, environment.read(START, reply("speak", "Buy it.")), table)
    assert step.state.turns == turns("Buy it.", "No.")
    assert (step.observation, step.done, step.outcome) == ('Tobin Hask said: "No."', False, None)
    ((speaker, told, tokens),) = table.told
    assert (speaker, tokens) == ("ann", 9)
    assert 'the other person said: "Buy it."' in told and "your turn, Tobin Hask" in told
    assert environment.speakers == ("ann",) and Sotopia().speakers == (POLICY,)


async def test_an_invalid_reply_does_nothing_and_an_unreadable_partner_is_asked_twice() -> None:
    environment = Sotopia()
    step = await take(environment, START, "hello", "what?", reply("action", "waits"))
    assert step.state.turns == (Turn(0, "none"), Turn(1, "action", "waits"))
    step = await take(environment, START, "hello", "what?", "what?")
    assert step.state.turns == turns("none", "none") and not step.done
    # the third turn of nothing ends it: the partner is not asked
    step = await take(environment, step.state, "again")
    assert step.done and step.observation == "The conversation is over."


async def test_a_side_that_leaves_ends_the_conversation() -> None:
    environment = Sotopia()
    assert (await take(environment, START, reply("leave"))).done
    left = await take(environment, START, reply("speak", "a"), reply("leave"))
    assert left.done and "Tobin Hask left the conversation" in left.observation
    begun = await environment.open(SotopiaState("scenario-01-1", 1), Table(reply("leave")))
    assert begun.turns == turns("none")  # the trained side acts at least once


def test_no_held_out_scenario_is_trained_and_every_episode_is_held_out_from_both_sides() -> None:
    environment = Sotopia()
    tasks = GeneratedTasks(environment.task, seed=1)
    trained = {environment.initial(tasks.at(position)) for position in range(2000)}
    held_out = {environment.initial(task) for task in tasks.held_out(20)}
    assert len(trained) == 2 * 30 and len(held_out) == 20
    assert not {state.combo[:11] for state in trained} & {state.combo[:11] for state in held_out}
    assert environment.task(HELD_OUT_SEEDS.start).source == "pay_rise"
    second = Sotopia(side="second")
    assert {second.initial(tasks.at(position)).trained for position in range(9)} == {1}


def test_scenarios_are_read_from_a_folder_in_the_layout_of_the_data(tmp_path: Path) -> None:
    whole = json.loads(OWN.read_bytes())
    for scenario in whole["envs"].values():
        del scenario["rules"]
    for name, key in (("agents", "agents"), ("envs", "envs"), ("env_agent_combos", "combos")):
        (tmp_path / f"{name}.json").write_text(json.dumps(whole[key]))
    assert len(Sotopia(str(tmp_path), judge="sotopia").library.combos) == 40
    with pytest.raises(ValueError, match=r"scenario-01.*no rules"):
        Sotopia(str(tmp_path))


FIRST = ("envs", "scenario-01")


@pytest.mark.parametrize(
    ("place", "change", "says"),
    [
        (FIRST, {"relationship": 6}, "relationship"),
        ((), {"combos": []}, "no combos"),
        ((*FIRST, "rules", 0, "goal", 0), {"says": "x"}, "exactly one"),
    ],
)
def test_a_file_outside_the_layout_is_refused_with_its_fault(
    tmp_path: Path, place: tuple[Any, ...], change: dict[str, Any], says: str
) -> None:
    whole = json.loads(OWN.read_bytes())
    functools.reduce(operator.getitem, place, whole).update(change)
    (tmp_path / "s.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=says):
        load(str(tmp_path / "s.json"))


def test_the_outcome_judge_sees_both_sides_and_the_last_words() -> None:
    environment = Sotopia()
    both = turns("40 euros.", "40 euros, then.")
    after = msgspec.structs.replace(START, turns=both)
    action = environment.read(START, reply("speak", "40 euros."))
    judged = environment.concluded(Task("t"), START, action, after, 1, 4)
    whole = msgspec.convert(judged.state, Dialogue)
    assert whole.turns == both and whole.trained == 0 and whole.rules is not None
    assert whole.names == ("Mara Ellwood", "Tobin Hask") and "40 euros or more" in whole.goals[0]
    # the budget ended it before the partner's reply
    cut = environment.concluded(Task("t"), START, action, None, 1, 4)
    assert msgspec.convert(cut.state, Dialogue).turns == both[:1]
