"""Whole updates: stop and resume, published weights, batches from the stream, rates, phases and
precision."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from coppice.common import frontier
from coppice.common.phases import PREFIX, Phases
from coppice.learner.config import OptimizerConfig
from coppice.learner.forest import selfcheck
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.forest.trees import pack
from coppice.learner.model import checkpoint
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.publish import announce, announced, publish
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.batches import Inbox
from coppice.learner.update.trainer import Batch
from coppice.tools.inspecting.export import export
from coppice.wire.messages import TrainGroup, TreeClosed, Turn
from coppice.wire.published import Weights
from tests.learner.conftest import Make
from tests.updates import (
    batch,
    changed,
    episodes,
    everything,
    few,
    gradient,
    groups,
    rescored,
    steady,
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_four_updates_equal_two_a_checkpoint_a_resume_and_two(
    tmp_path: Path, make: Make, rank: int, dtype: str
) -> None:
    straight, first, resumed = (make(rank, dtype=dtype) for _ in range(3))
    for version in range(4):
        straight.update(batch(version, version))
    for version in range(2):
        first.update(batch(version, version))
    # what lengths are compared with is part of the run
    first.watch.state.first["wrong"] = [2.0, 3.0]
    folder = checkpoint.save(first, tmp_path, [(1, 2, 1)], 3)
    assert checkpoint.restore(resumed, folder).groups() == {1: 1, 2: 1}
    assert resumed.watch.state.first == {"wrong": [2.0, 3.0]}
    for version in range(2, 4):
        resumed.update(batch(version, version))
    assert not changed(everything(straight), everything(resumed))


def test_versions_that_a_resume_makes_again_are_compared_with_no_engine(
    tmp_path: Path, make: Make
) -> None:
    """Turns of version 2 in the journal had other weights than the version 2 that follows."""

    def sampled_by(version: int) -> Batch:
        some = batch(version, version)
        for _, node in some.nodes:
            if node.versions is not None:
                node.versions[:] = version
        return some

    first, resumed = make(), make()
    first.update(batch(0, 0))
    checkpoint.save(first, tmp_path, [(1, 1, 1)], 3)
    announce(tmp_path, Weights(3))
    checkpoint.restore_newest(resumed, tmp_path)
    fresh = {v: "watch/engine_gap_max" in resumed.update(sampled_by(v)) for v in range(1, 5)}
    assert fresh == {1: True, 2: False, 3: False, 4: True}


def test_the_self_check_is_made_once_without_shared_prefixes_and_once_with(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compared = selfcheck._plain, list[int]()

    def counted(*given: Any) -> torch.Tensor:
        compared.append(made.version)
        return plain(*given)

    monkeypatch.setattr(selfcheck, "_plain", counted)
    made, alone = make(), few([True])
    for version, some in enumerate((alone, alone, batch(1, 2), batch(2, 3), alone)):
        made.update(msgspec.structs.replace(some, version=version))
    assert compared == [0, 2]


def test_with_one_optimizer_step_the_current_policy_is_the_proximal_one(make: Make) -> None:
    """Nothing is forwarded for it: the weight is current / behaviour."""
    options = {"upper": 1.1, "level": "token"}
    settings = {"scheme": "grpo", "correction_options": options, "grad_clip": 1e9}
    published, plain = (
        gradient(make(correction=which, **settings), episodes(8, 0)) for which in ("tis", "aipo")
    )
    assert plain.norm() > 1e-3
    assert_close(published, plain)


def test_turns_of_zero_advantage_change_nothing(make: Make) -> None:
    made = make(kl_coef=0.0)
    before = everything(made)
    assert made.update(rescored(batch(7, 0), lambda _: {"reward": 1.0}))["learner/skipped"] == 1
    assert made.version == 1
    assert not changed(before, everything(made))


def scored(some: Batch, outcome: Callable[[int, Turn], float | None], out: bool = False) -> Batch:
    """The batch with other outcomes (tree, last turn -> outcome); None: without an outcome, or,
    ``out``, without the trajectory's turns."""

    def turns(group: TrainGroup) -> Iterator[Turn]:
        last = {t.trajectory: outcome(group.tree, t) for t in group.turns if "outcome" in t.scores}
        for turn in group.turns:
            score, scores = last[turn.trajectory], dict(turn.scores)
            if scores.pop("outcome", None) is not None and score is not None:
                scores["outcome"] = score
            if score is not None or not out:
                yield msgspec.structs.replace(turn, scores=scores)

    made = [msgspec.structs.replace(group, turns=[*turns(group)]) for group in some.groups]
    return msgspec.structs.replace(some, groups=made)


MODELS = {
    "gae": {"critic": {"lr": 1e-2}, "aggregation": "token"},
    "oprl": {"prm": {"lr": 1e-2}},
    "prime": {"prm": {"lr": 1e-2, "loss": "cross_entropy"}},
}


@pytest.mark.second
@pytest.mark.parametrize("scheme", MODELS)
def test_no_trajectory_without_outcome_counts(make: Make, scheme: str) -> None:
    def known(tree: int, turn: Turn) -> float | None:
        return None if turn.trajectory == 0 else float(turn.trajectory == 1)

    some = episodes(8, 0)
    lacking, without = (steady(make(scheme=scheme, **MODELS[scheme])) for _ in range(2))
    before = everything(lacking)
    metrics = lacking.update(scored(some, known))
    expected = without.update(scored(some, known, out=True))
    left_out = [made["learner/left_out_trajectories"] for made in (metrics, expected)]
    assert left_out == [3, 0]
    assert metrics["learner/turns"] == expected["learner/turns"]
    after = everything(without)
    assert changed(before, after) == {name.split("/")[0] for name in before}
    assert not changed(everything(lacking), after)


def test_primes_reward_model_trains_on_what_its_filter_keeps(make: Make) -> None:
    some = episodes(8, 0)
    easy = some.groups[0].tree

    def outcome(tree: int, turn: Turn) -> float:
        return float(tree == easy or turn.trajectory == 1)

    def kept(tree: int, turn: Turn) -> float | None:
        return None if tree == easy else outcome(tree, turn)

    made, without = (steady(make(scheme="prime", **MODELS["prime"])) for _ in range(2))
    metrics = made.update(scored(some, outcome))
    expected = without.update(scored(some, kept, out=True))
    assert metrics["learner/left_out_trajectories"] == 3
    assert metrics["prm/comparisons"] == expected["prm/comparisons"] == 6
    assert not changed(everything(made), everything(without))
    nothing = made.update(msgspec.structs.replace(scored(some, lambda *_: 1.0), version=1))
    assert (nothing["learner/skipped"], nothing["learner/left_out_trajectories"]) == (1, 9)


def test_trees_with_a_token_older_than_the_bound_are_counted(make: Make) -> None:
    made, some = make(), batch(0, 0)  # three trees, all tokens of version 0
    made.process = msgspec.structs.replace(made.process, max_staleness=1)
    updates = [msgspec.structs.replace(some, version=version) for version in range(3)]
    assert [made.update(update)["learner/over_stale"] for update in updates] == [0, 0, 3]


def test_a_batch_is_the_oldest_closed_trees_whose_groups_are_all_here() -> None:
    some, _ = groups(0, trees=4)
    inbox = Inbox(2, {})
    for group in (some[0], some[2], some[3]):
        assert inbox.add(group)
    for group in reversed(some):
        inbox.close(TreeClosed(group.tree, [group.id]))
    # tree 3 closed first, and of tree 1 the group is still on its way
    assert inbox.ready() == [0, 2]
    taken = inbox.take([0, 2], 5)
    assert (taken.version, taken.questions, [g.id for g in taken.groups]) == (5, 2, [0, 2])
    assert inbox.runs == [(0, 0, 6), (2, 2, 6)] == frontier.runs(inbox.trained)
    assert inbox.ready() is None
    inbox.add(some[1])
    assert inbox.ready() == [1, 3]


def test_groups_of_a_replaced_tree_leave_with_the_next_batch_and_are_no_question() -> None:
    some, _ = groups(0, trees=4)
    inbox = Inbox(1, {3: 0})
    inbox.close(TreeClosed(0, [0], replaced=True))
    inbox.close(TreeClosed(1, [1], replaced=True))
    # its group is in the frontier, its closing comes again
    inbox.close(TreeClosed(3, [3], replaced=True))
    assert inbox.add(some[0])
    assert inbox.ready() is None
    inbox.add(some[2])
    inbox.close(TreeClosed(2, [2]))
    first = inbox.take([2], 0)
    assert (first.questions, [g.id for g in first.groups], first.replaced) == (1, [2], [0])
    assert {tree for tree, _ in first.nodes} == {2}
    assert set(inbox.trained) == {0, 2, 3}
    assert not inbox.add(some[0])
    inbox.close(TreeClosed(0, [0], replaced=True))
    assert inbox.add(some[1])  # it was still on its way
    inbox.close(TreeClosed(4, []))
    assert inbox.take([4], 1).replaced == [1]


PATHS = [Tokens([1, 2, 3, 4, 5], 3), Tokens([1, 2, 3, 9, 8, 7], 3), Tokens([1, 2, 6, 6], 2)]


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_stays_the_initial_policy(make: Make, rank: int) -> None:
    made = make(rank)
    initial = torch.cat([made.policy.read(pack([path]), attention="causal")[0] for path in PATHS])

    def reference() -> torch.Tensor:
        return made.policy.initial.read(pack(PATHS), made.policy.lora)[0]

    assert_close(reference(), initial, atol=2e-5, rtol=1e-5)
    for version in range(2):
        made.update(batch(version, version))
    assert_close(reference(), initial, atol=2e-5, rtol=1e-5)
    after = made.policy.read(pack(PATHS))[0]
    assert (after - initial).abs().max() > 1e-3
    assert after.requires_grad  # the adapters are on again


def test_a_phase_inside_another_one_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 3.0, 6.0, 10.0, 15.0, 21.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    timed = Phases()
    with timed.over("score"), timed.over("pack"):
        pass
    with timed.over("pack"):
        pass
    assert timed.take() == {f"{PREFIX}score": 2.0 + 4.0, f"{PREFIX}pack": 3.0 + 6.0}
    assert timed.take() == {}


def rates(updates: int, warmup: int, decay: int, schedule: Any, **settings: Any) -> list[float]:
    config = OptimizerConfig(8.0, warmup, decay, (0.9, 0.999), 0.0, 1.0, schedule, **settings)
    stepper = Stepper("policy", {"w": torch.nn.Parameter(torch.zeros(1))}, config, Ranks(60))
    return [stepper.rate(version) for version in range(updates)]


def test_each_schedule_has_its_rates() -> None:
    assert rates(7, 2, 6, "constant") == [4, 8, 8, 8, 8, 8, 8]
    assert rates(8, 2, 6, "linear") == [4, 8, 8, 6, 4, 2, 0, 0]
    assert rates(8, 2, 6, "linear", min_ratio=0.5) == [4, 8, 8, 7, 6, 5, 4, 4]
    # cos(pi / 4) = .7071, so a half of 1.7071 and of .2929
    cosine = [4, 8, 8, 8 * 0.85355, 4, 8 * 0.14645, 0, 0]
    assert rates(8, 2, 6, "cosine") == pytest.approx(cosine, abs=1e-4)


def test_the_critic_trains_alone_while_it_warms_up(make: Make) -> None:
    critic = {"lr": 1e-2, "policy_frozen_updates": 2}
    made = make(scheme="gae", critic=critic, warmup_updates=2, overlong_filter=True)
    before = everything(made)
    for version in range(2):
        metrics = made.update(episodes(version, version))
        assert metrics["learner/skipped"] == 1
        assert metrics["critic/grad_norm"] > 0
    assert (changed(before, everything(made)), made.version) == ({"critic"}, 2)
    # the first of the policy's own warm-up
    assert made.update(episodes(2, 2))["learner/lr"] == pytest.approx(0.005)
    assert changed(before, everything(made)) == {"critic", "policy"}
    before = everything(made)
    some = rescored(episodes(3, 3), lambda turn: turn.scores | {"truncated": 1.0})
    assert "critic/loss" not in made.update(some)  # no token trains, so no model makes a step
    assert not changed(before, everything(made))


def test_attention_of_another_device_is_refused_at_the_start(make: Make) -> None:
    with pytest.raises(ValueError, match=r"learner\.attention = 'flex' trains on cuda alone"):
        make(attention="flex")


def test_published_adapters_merged_equal_the_policy(tmp_path: Path, make: Make) -> None:
    made = make()
    made.update(batch(3, 0))
    publish(made.policy, 1, tmp_path, 2)
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "learner.json").write_bytes(msgspec.json.encode(made.process))
    assert export(tmp_path, tmp_path / "export") == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template
    with pytest.raises(ValueError, match="holds"):
        export(tmp_path, tmp_path / "export", version=9)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = made.policy.causal(ids).logits
        assert_close(exported(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_the_newest_version_of_all_starts_is_remembered(tmp_path: Path) -> None:
    for version in (4, 2, 3):
        announce(tmp_path, Weights(version))
    assert announced(tmp_path) == 4


def test_after_a_step_back_the_newest_weights_stay_and_undone_ones_go(
    tmp_path: Path, make: Make
) -> None:
    policy = make().policy
    for version in (7, 8, 9, 4, 5):
        publish(policy, version, tmp_path, keep=2)
    held = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert held == ["v000004", "v000005"]
