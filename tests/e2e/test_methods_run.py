"""A short whole run of each tree method, and of PPR: real engine, scheduler, journal and learner,
with the method's own strategy and scheme."""

from pathlib import Path

import pytest

from tests.learner.test_architectures import made
from tests.runs import Launch
from tests.world import QUESTIONS

METHODS = {
    "tree_grpo": ("tree_grpo", "{trees=2,nodes=2}", 6),
    "treerl": ("treerl", "{trees=2,tokens=1,continuations=2}", 6),
    "treepo": ("treepo", "{leaves=5,segment=4,depth=3}", 5),
    "spo": ("spo", "{branching=[2,3],segment=4}", 6),
    "arpo": ("arpo", "{budget=5,initial=2,base=0.9}", 5),
    "vineppo": ("mc_value", "{continuations=3}", 1),
    "sao": ("chain", "{}", 1),
}
"""By scheme: the strategy, its options, and the trajectories that it trains per question."""
SHORT = """
data.options.prompt=question scheduler.max_action_tokens=8 actors.max_context=1024
learner.aggregation=token learner.entropy_coef=0.0 learner.kl_coef=0.0
"""


@pytest.mark.parametrize("scheme", METHODS)
def test_a_tree_method_trains_on_all_its_leaves(
    scheme: str, searching: Path, launch: Launch
) -> None:
    strategy, options, leaves = METHODS[scheme]
    critic = "learner.correction=icepop learner.critic={steps=2,lr=1e-3}"
    run = launch(
        searching,
        f"""{SHORT} data.environment=tests.search:CoinSearch judges.use={{'tests.search:Coin'={{}}}}
        scheduler.judge=none scheduler.strategy={strategy} scheduler.strategy_options={options}
        scheduler.budget=3 scheduler.updates=1 learner.scheme={scheme}
        {critic if scheme == "sao" else ""}""",
    )
    run.finish()
    run.check(updates=1)
    journal = run.journal()
    for tree in journal.trees("split='train'"):
        groups = [journal.turns(group) for group, _ in journal.groups(tree.id)]
        assert len(groups) == (2 if scheme == "tree_grpo" else 1)
        turns = [turn for group in groups for turn in group]
        paths = {(i, turn.trajectory) for i, group in enumerate(groups) for turn in group}
        assert len(paths) == leaves
        nodes = journal.tree(tree).nodes.values()
        sampled = {node.id for node in nodes if node.kind == "action" and not node.forced}
        assert {turn.node for turn in turns} == sampled
    gaps = [r["watch/engine_gap_max"] for r in run.records() if "watch/engine_gap_max" in r]
    assert max(gaps) < 1e-3  # copied log-probabilities are those of the tokens they belong to


def test_ppr_rewards_every_turn_but_the_last_and_its_critic_learns_through_kill_9(
    searching: Path, launch: Launch, tmp_path: Path
) -> None:
    """Its judge is a language model that the run serves itself, held to its form."""
    # prompts of a few bytes, since each is a token
    (tmp_path / "system.txt").write_text("Grade.")
    (tmp_path / "user.txt").write_text("{query_str}\n{solution_str}")
    templates = f"{{system='{tmp_path}/system.txt',user='{tmp_path}/user.txt'}}"
    judge = f"{{endpoint={{url='served',max_tokens=80}},templates={templates}}}"
    run = launch(
        searching,
        f"""{SHORT} data.environment=tests.search:AnySearch scheduler.strategy=ppr
        scheduler.strategy_options={{}} scheduler.judge=pprm scheduler.budget=4
        scheduler.evaluation.questions=2 judges.use={{exact_match={{}},pprm={judge}}}
        judges.model={{name='{searching.parent}/model',max_context=1024,kv_cache_gib=0.02}}
        learner.scheme=ppr learner.scheme_options={{kl_coef=0.001}} learner.critic={{lr=1e-3}}""",
    )
    run.killed_and_resumed()
    run.check()
    groups = run.groups()
    assert len(groups) == 3 * QUESTIONS
    for turns in groups:
        assert len(turns) == 3, "two rounds of search, then an answer"
        assert all(
            turn.scores["judge_valid"] == 1 and 0 <= turn.scores["process"] <= 1
            for turn in turns[:-1]
        )
        assert "process" not in turns[-1].scores
        assert turns[-1].scores["searches"] == 2
    for record in run.trained():
        assert record["ppr/turn_pay_wrong"] == pytest.approx(record["score/process"] - 1)
        assert record["critic/loss"] >= 0
    assert "process" in run.summary()["heldout"]["end"]["measures"]


def test_a_mixture_is_trained_with_the_experts_that_its_engine_chose_through_kill_9(
    searching: Path, launch: Launch, tmp_path: Path
) -> None:
    folder = made(tmp_path / "mixture", "qwen3_moe")
    routed = f"model.name={folder} model.dtype=bfloat16 learner.routing_replay=true"
    run = launch(searching, f"{SHORT} {routed} scheduler.updates=3 learner.kl_coef=0.1")
    run.killed_and_resumed()
    run.check(updates=3, learns=False)
    actions = [n for tree in run.trees() for n in tree.nodes.values() if n.kind == "action"]
    told = [node.experts is not None for node in actions if not node.forced]
    assert told and all(told)
    measured = [record for record in run.records() if "watch/routing_differs" in record]
    assert measured and all(record["watch/routing_differs"] < 0.1 for record in measured)
    gaps = [r["watch/engine_gap_max"] for r in measured if "watch/engine_gap_max" in r]
    assert gaps and max(gaps) < 0.2
