"""Every scheme: known answers (methods.md 5, or worked by hand beside the test) and properties on
random tables. The tree methods' schemes are in test_tree_schemes.py."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from coppice.common.options import modules
from coppice.learner import schemes
from coppice.learner.schemes import gae, grpo, oprl, ppr
from coppice.learner.update.table import TurnTable
from coppice.learner.update.targets import Advantages
from tests.learner.tables import NO, estimated, made_of, random_table

Which = tuple[str, dict[str, Any]]


def steps(reward: list[float], group: list[int]) -> TurnTable:
    n = len(reward)
    t = made_of([1] * n, {"reward": reward}, tokens=list(range(1, n + 1)))
    return msgspec.structs.replace(t, group=np.array(group))


def targets(made: Advantages) -> np.ndarray:
    assert made.returns is not None
    return made.returns


# Returns 2, 1, 0, 0, -2: the known answer of SLATE's candidates (methods.md 5)
SAMPLE = [1.2136, 0.5394, -0.1348, -0.1348, -1.4832]
POPULATION = [1.3568, 0.6030, -0.1508, -0.1508, -1.6583]
CANDIDATES = steps([2, 1, 0, 0, -2], [0] * 5)
# the same returns over two turns a trajectory, and over one or two
TWO_TURNS = made_of([2] * 5, {"reward": [1, 1, 2, -1, -1, 1, 0, 0, -1, -1]})
UNEVEN = made_of([2, 1, 2, 1, 2], {"reward": [1.5, 0.5, 1, 1, -1, 0, -1, -1]})
FOUR = made_of([1] * 4, {"reward": [3, 1, 0, 2]}, tree=[0, 0, 1, 1], tokens=[1, 2, 1, 1])
FORCED = made_of(
    [1] * 3, {"reward": [3, 1, 0]}, tokens=[1, 2, 1], sampled=[True, True, False, True]
)
# 10, 0, 2 against 1, 6, 5; a question of two: 3 against -1; a lone trajectory has no other
QUESTIONS = made_of([2, 1, 1, 1, 1, 1], {"reward": [4, 6, 0, 2, 3, -1, 9]}, tree=[0, 0, 0, 1, 1, 2])
# methods.md 5: rewards by turn, in trajectories of 4, 3, 3, 2, 2 and 1 turns
VPR = made_of([4, 3, 3, 2, 2, 1], {"reward": [1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1]})
VPR_V2 = made_of(
    [1] * 12,
    {"reward": [2, 0, -1, -1, 1, 1, 1, 1, 0.5, -2, NO, 0.5]},
    tree=[0] * 4 + [1] * 4 + [2] * 4,
)
# Centred: 2, 0, -1, -1 and (mean -1/3) 5/6, -5/3, 5/6; the squares sum to 6 + 25/6 over seven
CENTRED = np.array([2, 0, -1, -1, 0, 0, 0, 0, 5 / 6, -5 / 3, 0, 5 / 6]) / ((6 + 25 / 6) / 7) ** 0.5
EPISODES = made_of([2, 1, 2, 1], {"outcome": [NO, 1, -1, NO, 0, 1]}, tree=[0, 1, 2, 3])
HALF = 0.5**0.5


def oprl_case(**more: list[float]) -> TurnTable:
    """methods.md 5: log-ratios [[4, -2], [1, 0, -3]], beta .05, R = [10, 0]."""
    columns = {"outcome": [NO, 10, NO, NO, 0], "step_reward": [1, 2, 3, 4, NO]} | more
    prm = [0.05 * x for x in (4, -2, 1, 0, -3)]
    return made_of([2, 3], columns, token_scores={"prm": prm, "value": [0.0] * 5})


OPRL = oprl_case()
A_S, RLOO_S = (np.array([4, -2, 1, 0, -3]) * unit for unit in (0.36515, 0.0625))
A_E, RLOO_E = (np.array([1, 1, -1, -1, -1]) * unit for unit in (HALF, 10))
MERGED = np.array([10.2, 9.9, 0.05, 0, -0.15])
AHEAD = np.array([0.1, -0.1, -0.1, -0.15, -0.15])
# outcomes centred: 5, 5, -5, -5, -5 over tokens: mean -1, variance 25 - 1
WHITE = np.array([1.2247, 1.2247, -0.8165, -0.8165, -0.8165])
FOUR_STEPS = np.array([-1.5, -0.5, 0.5, 1.5, 0])
# G = [.95, 1], [.5 + .9025, .95, 1]; anchor 7: .95, 1.4025; anchor 8: 1, 1; anchor 9 alone.
# Episodes: 1, 1.5
SEEN_AGAIN = made_of([2, 3], {"reward": [0, 1, 0.5, 0, 1]}, anchor=[7, 8, 7, 9, 8])
EPISODE = np.array([-0.25, -0.25, 0.25, 0.25, 0.25])
MC_PR = {
    "mc_value": [0.5, 0.9, 0.5, 0.1, 0.5, 0.9, 0.5, 0.1, 0.5, NO],
    "outcome": [NO, 1, NO, 0] * 2 + [NO, 1],
}  # fmt: skip

# Rewards .2, -.1, .3 (right) | forced, -.4 (wrong); both responses to question 1 are right
PRIME = made_of(
    [3, 1, 1, 2], {"outcome": [NO, NO, 1, 0, 1, NO, 1]}, [0, 0, 1, 1], [1, 1, 1, 2, 1, 1, 1],
    [True] * 3 + [False] + [True] * 4, {"prm": [0.2, -0.1, 0.3, 9, -0.4, 0.7, 0.2, -0.3]},
)  # fmt: skip

KNOWN: list[tuple[str, dict[str, Any], TurnTable, Any]] = [
    ("slate", {}, CANDIDATES, SAMPLE),
    ("slate", {"ddof": 0}, CANDIDATES, POPULATION),
    ("slate", {}, steps([1.5], [3]), [1.5]),  # one candidate is REINFORCE
    ("slate", {}, steps([1, 1, -1, 3], [0, 0, 1, 1]), [0, 0, -HALF, HALF]),
    ("grpo", {}, TWO_TURNS, np.repeat(SAMPLE, 2)),
    ("grpo", {"ddof": 0}, TWO_TURNS, np.repeat(POPULATION, 2)),
    ("grpo", {"column": "outcome"}, made_of([2, 2], {"outcome": [NO, 1, NO, 0]}),
     [HALF, HALF, -HALF, -HALF]),
    ("grpo", {"std": False}, made_of([2, 2, 1], {"reward": [1, 1, 0, 0, 5]}, [0, 0, 1]),
     [1, 1, -1, -1, 0]),
    ("slate_full", {}, UNEVEN, np.repeat(SAMPLE, [2, 1, 2, 1, 2])),
    ("rloo", {}, QUESTIONS, [9, 9, -6, -3, 4, -4, 0]),
    # returns 3, 1 | 0, 2 centred over tokens: 1, -1, -1 | -1, 1 with mean -.2, variance 1 - .04
    ("reinforce_pp", {}, FOUR, [1.2247, -0.8165, -0.8165, 1.2247]),
    # 3, 1, 1, 0, 2: mean 1.4, variance 3 - 1.96 = 1.04
    ("reinforce_pp", {"baseline": "none"}, FOUR, [1.5689, -0.3922, -1.3728, 0.5883]),
    # sampled: 3, 1, 0 with mean 4/3 and variance 10/3 - 16/9 = 14/9; forced tokens get 0
    ("reinforce_pp", {"baseline": "none"}, FORCED, [1.3363, 0, -1.0690]),
    # turns 3 and 4 have fewer than four active trajectories: statistics of the whole batch
    # and with five each turn of which five are active is compared with itself
    ("turn_grpo", {"n_min": 5}, VPR,
     [0.7071, 0.5, -1.6583, 0.6030, -1.4142, 0.5, 0.6030, 0.7071, -2, 0.6030,
      0.7071, 0.5, -1.4142, 0.5, 0.7071]),
    ("turn_grpo", {"n_min": 7}, VPR, (VPR.column("reward") - 11 / 15) / 0.442217),
    ("turn_grpo", {}, made_of([1] * 5, {"reward": [1, 0, 1, 0, NO]}), [1, -1, 1, -1, 0]),
    ("vpr_v2", {}, VPR_V2, CENTRED),
    ("vpr_v2", {"most_equal": 0.33}, VPR_V2, [0] * 12),  # one of three groups is equal
    # returns 1, -1, 0 (out of turns), 1: mean .25, population variance .75 - .0625
    ("outcome", {}, EPISODES, [0.9045, 0.9045, -1.5076, -0.3015, -0.3015, 0.9045]),
    # Over the largest return-to-go, .4: .5, -.25, .75 | -1, each less the mean -1/3 of the means 1/3
    # and -1, doubled: 5/3, 1/6, 13/6 | -4/3. Five times what is ahead and the outcome, 1 | -1: 25,
    # 50/3, 95/6 | -35/3. Question 1 is left out.
    ("prime", {}, PRIME, [0.9796, 0.3768, 0.3165, -1.6728, 0, 0, 0]),
    ("prime", {"accuracy_low": 0.6}, PRIME, [0] * 7),
    ("prime", {"threshold": 1.0}, PRIME, [0] * 7),  # no outcome is right
    # With question 1 the largest is .7. That question's mean is (1 - 1/14) / 2 = 13/28, its process
    # 15/14 | -5/14, -25/14, its outcome 0. Question 0: mean -4/21, process 20/21, 2/21, 26/21 | -16/21.
    ("prime", {"accuracy_low": 0, "accuracy_high": 1}, PRIME,
     [1.3249, 0.8779, 0.8332, -1.0439, 0.2857, -1.2227, -1.0551]),
    # 2 + 1, 1 + a missing reward, 0 + 1: the returns 3 and 1 are compared
    ("rloo", {}, made_of([2, 2, 2], {"reward": [2, 1, 1, NO, 0, 1]}), [2, 2, 0, 0, -2, -2]),
    # turn 1: .4, -.4, .4, -.4 and one missing; turn 2: .1, -.1, .1, -.1 and one missing
    ("mc_pr", {}, made_of([2] * 5, MC_PR), [1, 1, -1, -1] * 2 + [0, 0]),
    ("gigpo", {}, SEEN_AGAIN, EPISODE + np.array([-0.2263, 0, 0.2263, 0, 0])),
    ("gigpo", {"alpha": 0, "episode_std": True}, SEEN_AGAIN, 4 * HALF * EPISODE),
    # a valid and an invalid first step of two lost games, on the same board
    (
        "gigpo", {"invalid_penalty": 0.1},
        made_of([1, 1], {"reward": [0, 0], "valid": [1, 0]}, anchor=[7, 7]),
        [0.1, -0.1],
    ),
    ("gigpo", {"step_std": True}, SEEN_AGAIN, EPISODE + HALF * np.array([-1, 0, 1, 0, 0])),
    # one observation in two questions is two
    ("gigpo", {}, made_of([1, 1], {"reward": [0, 1]}, tree=[0, 1], anchor=[7, 7]), [0, 0]),
    # G = .95 x 1, 1 on one observation: mean .975; a lone episode has no episode advantage
    ("gigpo", {}, made_of([2], {"reward": [NO, 1]}, anchor=[3, 3]), [-0.025, 0.025]),
    ("oprl", {"variant": "process"}, OPRL, A_S),
    ("oprl", {"alpha": 2}, OPRL, A_E + 2 * A_S),
    ("oprl", {"base": "rloo", "alpha": 2}, OPRL, RLOO_E + 2 * RLOO_S),
    ("oprl", {"base": "reinforce_pp", "alpha": 0}, OPRL, WHITE),
    # .2, -.1, .05, 0, -.15 with mean 0 and population variance .015: sample A_S x sqrt(5 / 4)
    ("oprl", {"base": "reinforce_pp", "variant": "process"}, OPRL, np.sqrt(5 / 4) * A_S),
    # 10 + [.2, -.1] and 0 + [.05, 0, -.15]: leave-one-out over the five rows, sum 20
    ("oprl", {"base": "rloo", "variant": "merged"}, OPRL, MERGED - (20 - MERGED) / 4),
    # 1, 2, 3, 4 with mean 2.5; the fifth step has no reward
    ("oprl", {"base": "rloo", "variant": "environment"}, OPRL, RLOO_E + 4 / 3 * FOUR_STEPS),
    ("oprl", {"base": "reinforce_pp", "variant": "environment"}, OPRL,
     WHITE + FOUR_STEPS / 1.25**0.5),
    # returns-to-go: .1, -.1 | -.1, -.15, -.15: sum -.4
    ("oprl", {"base": "rloo", "variant": "token"}, OPRL, RLOO_E + 1.25 * (AHEAD + 0.08)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "table", "expected"), KNOWN)
def test_known_answers(name: str, options: dict[str, Any], table: TurnTable, expected: Any) -> None:
    made = estimated(table, name, **options).advantages
    assert_allclose(made[np.cumsum(table.tokens) - 1], expected, atol=1e-4)


def test_a_score_column_that_no_turn_has_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match="reward"):
        grpo.advantages(steps([1.0], [0]), column="outcome")


def critic_case(**more: list[float]) -> TurnTable:
    """Turns of two tokens and of one, the second token forced; values .5, .25, .75; outcome 1."""
    columns = {"value": [0.5, 0.25, 0.75]} | more
    return made_of(
        [2], {"outcome": [NO, 1]}, tokens=[2, 1], sampled=[True, False, True], token_scores=columns
    )


OFF, FAR = (critic_case(log_ratio=np.log([1.0, 1, last]).tolist()) for last in (0.5, 4.0))


def ppr_case(r_hat: list[float], r_o: float) -> TurnTable:
    """One trajectory of judged turns and a last one, a token each; the critic knows nothing."""
    n = len(r_hat) + 1
    scores = {"process": [*r_hat, NO], "outcome": [NO] * (n - 1) + [r_o]}
    return made_of([n], scores, token_scores={"value": [0.0] * n})


# Trajectories with r_hat .5, 1, .25 (an invalid judgement before it) and r_o = 1, 0, whose last
# turns are not judged, even where a score is there; three tokens a turn
TWO_JUDGED = made_of(
    [3, 3], {"process": [0.5, 1, 0.9, NO, 0.25, 0.9], "outcome": [NO, NO, 1, NO, NO, 0]},
    tokens=[3] * 6, token_scores={"value": [0.0] * 18},
)  # fmt: skip
# normalised by a constant; each turn is paid at its last token
PPR: list[tuple[TurnTable, Any]] = [
    (ppr_case([4 / 6, 1], 1), [2.6667, 2, 1]),
    (ppr_case([4 / 6, 1], 0), [-0.3333, 0, 0]),
    (TWO_JUDGED, np.repeat([2.5, 2, 1, -1.75, -0.75, 0], 3)),
]
CRITICS: list[tuple[str, TurnTable, dict[str, Any], Any, Any]] = [
    ("gae", critic_case(), {}, [0.5, 0, 0.25], [1, 0, 1]),
    # whitened over the sampled tokens .5 and .25: mean .375, std .125; the targets stay raw
    ("gae", critic_case(), {"whiten": True}, [1, 0, -1], [1, 0, 1]),
    # gamma .9, lambda .5: deltas .9 x .75 - .5 and .25; A_0 .175 + .45 x .25
    ("gae", critic_case(), {"gamma": 0.9, "lam": 0.5}, [0.2875, 0, 0.25], [0.7875, 0, 1]),
    # rewards -.1 x .2, forced, 1 - .1 x .3
    ("gae", critic_case(kl=[0.2, 5.0, 0.3]), {"kl_coef": 0.1},
     [0.45, 0, 0.22], [0.95, 0, 0.97]),
    # V-trace with the last ratio 4 and rho-bar 2: the last target is .75 + 2 (1 - .75) = 1.25; c-bar
    # .5 passes half of a gap on: .25 + .5 x .5
    ("gae", FAR, {"targets": "vtrace", "rho_max": 2.0, "c_max": 0.5},
     [0.75, 0, 0.25], [1, 0, 1.25]),
    # Retrace: .25, then .75 + .5 x .25 - .5
    ("gae", OFF, {"targets": "retrace"}, [0.375, 0, 0.25], [0.875, 0, 0.875]),
    *(("ppr", judged, {}, returns, returns) for judged, returns in PPR),
]  # fmt: skip


@pytest.mark.parametrize(("name", "table", "options", "advantages", "returns"), CRITICS)
def test_with_a_critic_advantages_and_its_targets_are_known(
    name: str, table: TurnTable, options: dict[str, Any], advantages: Any, returns: Any
) -> None:
    made = estimated(table, name, **({"whiten": False} | options))
    assert_allclose(made.advantages, advantages, atol=5e-5)
    assert_allclose(targets(made), returns, atol=5e-5)


def rewards_of(
    t: TurnTable, how: ppr.Normalisation = "constant", invalid: ppr.Invalid = "zero"
) -> np.ndarray:
    return ppr.turn_rewards(t, how, invalid, "process", "outcome")


@pytest.mark.parametrize(
    ("how", "invalid", "expected"),
    [
        ("constant", "zero", [0.5, 1, 1, -1, -0.75, 0]),
        ("none", "zero", [0.5, 1, 1, 0, 0.25, 0]),
        ("rescale", "zero", [0.25, 0.5, 1, 0, 0.125, 0]),
        ("reduced", "zero", [0, 0, 2.5, 0, 0, 0.25]),
        # mu = 1.75 / 4, pi = 2 / 4
        ("sample", "zero", [0.5625, 1.0625, 1, -0.9375, -0.6875, 0]),
        # an invalid judgement is skipped whole
        ("constant", "skip", [0.5, 1, 1, 0, -0.75, 0]),
        ("rescale", "skip", [0.25, 0.5, 1, 0, 0.25, 0]),
        # mu = 1.75 / 3, pi = 2 / 3 over the three judged turns
        ("sample", "skip", [0.25, 0.75, 1, 0, -1, 0]),
    ],
)
def test_ppr_normalisations_by_hand(
    how: ppr.Normalisation, invalid: ppr.Invalid, expected: list[float]
) -> None:
    assert_allclose(rewards_of(TWO_JUDGED, how, invalid), expected)


def test_ppr_measures_what_a_turn_pays_in_correct_and_in_wrong_trajectories() -> None:
    assert schemes.load("ppr", {}).metrics(TWO_JUDGED) == {
        "ppr/turns_correct": 3,
        "ppr/turns_wrong": 3,
        "ppr/turn_pay_correct": 0.75,  # (.5 + 1) / 2
        "ppr/turn_pay_wrong": -0.875,  # (-1 + .25 - 1) / 2: the invalid one counts as r_hat = 0
        "ppr/process_reward": -0.0625,
    }
    skipped = schemes.load("ppr", {"invalid": "skip"}).metrics(TWO_JUDGED)
    assert (skipped["ppr/turn_pay_wrong"], skipped["ppr/process_reward"]) == (-0.75, 0.25)


def test_oprl_on_ppo_adds_the_step_advantage_to_token_gae_on_the_outcome() -> None:
    made, critic = oprl.advantages(OPRL, "ppo"), gae.advantages(OPRL)
    assert_allclose(made.advantages, critic.advantages + A_S, atol=5e-5)
    assert targets(made).tolist() == [10, 10, 0, 0, 0]


@pytest.mark.parametrize(("base", "moved"), [("grpo", 0.1 / np.sqrt(50)), ("rloo", 0.1)])
def test_an_invalid_step_lowers_the_advantage_of_no_other(base: oprl.Base, moved: float) -> None:
    fined, plain = oprl_case(valid=[1, 1, 0, NO, 1]), oprl.advantages(OPRL, base).advantages
    for penalty in (0.1, 1.0):
        lost = plain - oprl.advantages(fined, base, invalid_penalty=penalty).advantages
        assert_allclose(lost, [0, 0, 10 * penalty * moved, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("outcomes", "penalty", "expected"),
    [
        ([0.3, 0.1 + 0.2, 0.3, 0.3], 0.1, -0.1),  # equal but for a rounding
        ([1, 1, 1, 1], 2.0, -2.0),
        ([1e-5, 1e-5, 0, 1e-5], 0.1, -1.0 - 1.5),  # a penalty is divided by .1 at least
        ([0, 1, 0, 0], 2.0, -4.0 - 0.5),
    ],
)
def test_outcomes_that_hardly_differ_make_little_of_a_penalty(
    outcomes: list[float], penalty: float, expected: float
) -> None:
    columns = {"outcome": outcomes, "valid": [1, 1, 0, 1]}
    table = made_of([1] * 4, columns, token_scores={"prm": [0.0] * 4})
    advantages = oprl.advantages(table, invalid_penalty=penalty).advantages
    assert advantages[2] == pytest.approx(expected, rel=0.2)


# Properties on random tables

SEEDS = st.integers(0, 2**32 - 1)
BASES, VARIANTS = "grpo rloo reinforce_pp ppo", "step process merged token environment"
NO_CRITIC = {("ppo", "process"), ("ppo", "merged")}
EVERY: list[Which] = [
    ("gae", {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1}),
    ("gae", {"whiten": False, "targets": "vtrace"}),
    ("gigpo", {"step_std": True, "episode_std": True}),
    *(("oprl", {"base": base, "variant": variant}) for base in BASES.split()
      for variant in VARIANTS.split() if (base, variant) not in NO_CRITIC),
    *(("ppr", {"normalisation": how}) for how in "constant sample none rescale reduced".split()),
    ("ppr", {"invalid": "skip", "targets": "retrace"}),
    ("prime", {"accuracy_low": 0, "accuracy_high": 1}),
    ("reinforce_pp", {}), ("reinforce_pp", {"baseline": "none"}), ("turn_grpo", {"n_min": 2}),
    *((name, {}) for name in "grpo mc_pr outcome rloo slate slate_full vpr_v2".split()),
]  # fmt: skip
ON_TREES = {"arpo", "sao", "spo", "tree_grpo", "treepo", "treerl", "vineppo"}


def permuted(t: TurnTable, order: np.ndarray) -> tuple[TurnTable, np.ndarray]:
    """The table with its rows in another order, and the old index of each token."""
    pieces = np.split(np.arange(int(t.tokens.sum())), np.cumsum(t.tokens)[:-1])
    flat = np.concatenate([pieces[i] for i in order])
    assert t.anchor is not None
    moved = TurnTable(
        t.tree[order], t.group[order], t.trajectory[order], t.turn[order], t.tokens[order],
        {name: column[order] for name, column in t.scores.items()}, t.anchor[order], t.mask()[flat],
        {name: column[flat] for name, column in t.token_scores.items()},
    )  # fmt: skip
    return moved, flat


def test_the_properties_cover_every_scheme() -> None:
    assert {name for name, _ in EVERY} | ON_TREES == set(modules(schemes.__name__))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(EVERY))
def test_permuting_the_rows_permutes_advantages_and_targets(seed: int, which: Which) -> None:
    t, scheme = random_table(seed), schemes.load(*which)
    moved, flat = permuted(t, np.random.default_rng(seed).permutation(len(t)))
    before, after = scheme(t), scheme(moved)
    assert_allclose(after.advantages, before.advantages[flat], atol=1e-6)
    if before.returns is not None:
        assert_allclose(targets(after), before.returns[flat], atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from([*EVERY, ("sao", {"alpha": 1.0})]))
def test_forced_tokens_change_no_advantage_of_a_sampled_one(seed: int, which: Which) -> None:
    t, scheme = random_table(seed), schemes.load(*which)
    some = np.flatnonzero(t.per_turn(np.ones(len(t.mask()))) > 0)
    assume(len(some))
    t = permuted(t, some)[0]  # without turns of forced tokens alone
    mask = t.mask()
    bare = msgspec.structs.replace(
        t, tokens=t.per_turn(np.ones(len(mask))).astype(np.int64), sampled=mask[mask],
        token_scores={name: column[mask] for name, column in t.token_scores.items()},
    )  # fmt: skip
    assume(not np.isnan(t.trajectories().total(t.column("outcome"))).any())
    assert_allclose(scheme(t).advantages[mask], scheme(bare).advantages, atol=1e-6)


def lacking(t: TurnTable, turns: np.ndarray) -> TurnTable:
    """The table without the outcome and the rewards of some turns, [turns]."""
    names = ("outcome", "reward", "step_reward")
    missing = {name: np.where(turns, NO, t.column(name)) for name in names}
    return msgspec.structs.replace(t, scores=t.scores | missing)


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from([which for which in EVERY if which[0] != "slate"]))
def test_a_trajectory_without_outcome_changes_no_other(seed: int, which: Which) -> None:
    t, (name, options) = random_table(seed), which
    trajectories = t.trajectories()
    gone = trajectories.of == seed % len(trajectories.tree)
    assume(not gone.all())
    made = estimated(lacking(t, gone), name, **options)
    without = estimated(t.only(~gone), name, **options)
    tokens = t.per_token(gone)
    assert not made.advantages[tokens].any()
    assert_allclose(made.advantages[~tokens], without.advantages, atol=1e-9)
    if without.returns is not None:
        assert_allclose(targets(made)[~tokens], without.returns, atol=1e-12)


def test_trajectories_without_a_score_are_counted_unless_left_out() -> None:
    t = made_of([1] * 5, {"reward": [1, NO, 0, NO, 5]}, tree=[0, 0, 0, 1, 1])
    assert schemes.load("slate", {}).metrics(t) == {"learner/incomplete_trajectories": 2}
    assert schemes.load("grpo", {}).metrics(t) == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gae", {}), ("ppr", {}), ("reinforce_pp", {}), ("oprl", {"base": "reinforce_pp"}),
        ("prime", {"accuracy_low": 0, "accuracy_high": 1}), ("outcome", {}), ("vpr_v2", {}),
        ("turn_grpo", {"n_min": 99}), ("mc_pr", {"n_min": 99}),
    ],
)  # fmt: skip
def test_sample_and_population_deviation_have_their_ratio(
    name: str, options: dict[str, Any]
) -> None:
    t, of_turns = random_table(11), name in ("vpr_v2", "turn_grpo", "mc_pr")
    option = "ddof" if of_turns or name == "outcome" else "whiten_ddof"
    population, sample = (
        schemes.load(name, options | {option: ddof})(t).advantages for ddof in (0, 1)
    )
    n = len(t) if of_turns else t.mask().sum()
    if name == "outcome":
        n = len(t.trajectories().tree)
    assert np.abs(population).max() > 0.1
    assert_allclose(population, sample * np.sqrt(n / (n - 1)), atol=1e-4)


@pytest.mark.parametrize("which", EVERY, ids=str)
def test_a_scheme_reads_the_token_columns_it_needs_and_no_other_and_is_finite(which: Which) -> None:
    t, scheme = random_table(5), schemes.load(*which)
    needed = {
        name: column for name, column in t.token_scores.items() if name in scheme.needs.models
    }
    made = scheme(msgspec.structs.replace(t, token_scores=needed))
    assert made.advantages.shape == (int(t.tokens.sum()),)
    assert np.isfinite(made.advantages).all()
    assert (made.returns is not None) == ("value" in scheme.needs.models)
    for missing in needed:
        rest = {name: column for name, column in needed.items() if name != missing}
        with pytest.raises(KeyError, match=missing):
            scheme(msgspec.structs.replace(t, token_scores=rest))


def test_metrics_are_finite_floats_and_what_is_no_number_is_named() -> None:
    odd = {"a": np.float32(0.5), "b": np.float64("nan"), "c": math.inf, "d": True}
    kept = schemes.finite(odd)
    assert kept == {"a": 0.5, "d": 1.0} and {*map(type, kept.values())} == {float}
    with pytest.raises(ValueError, match="the metric 'e' is 'much': expected a number"):
        schemes.finite({"e": "much"})
