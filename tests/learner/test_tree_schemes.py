"""The tree methods' schemes: every expected number was worked by hand beside its test."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from coppice.learner import schemes
from coppice.learner.forest.segments import segments
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.schemes import arpo, grpo
from coppice.learner.update.table import TurnTable
from tests.learner import released
from tests.learner.released import Node, grown, ours
from tests.learner.tables import acted, estimated, made_of
from tests.updates import episodes, table_of, trainer

SURE, UNSURE = -0.01, -1.0  # log-probabilities above and below log 0.9


def leaves(
    paths: list[list[list[int]]], outcomes: list[float], groups: list[int] | None = None,
    fresh: bool = False,
) -> TurnTable:  # fmt: skip
    """One question's trajectories, each a list of turns of tokens. Observations are the token 99; a
    negative token was sampled surely; fresh: a turn's prompt is its own number."""
    lengths, turns = list(map(len, paths)), [(path, t) for path in paths for t in range(len(path))]
    outcome = np.full(len(turns), np.nan)
    outcome[np.cumsum(lengths) - 1] = outcomes
    tokens = [len(path[t]) for path, t in turns]
    table = made_of(lengths, {"outcome": outcome.tolist()}, tokens=tokens)
    group, texts = (
        np.repeat(groups or [0] * len(paths), lengths),
        [_path(*at, fresh) for at in turns],
    )
    return msgspec.structs.replace(table, group=group, paths=texts)


def with_column(table: TurnTable, **columns: list[float]) -> TurnTable:
    return msgspec.structs.replace(
        table, scores=table.scores | {name: np.array(own) for name, own in columns.items()}
    )


def _path(path: list[list[int]], t: int, fresh: bool) -> Tokens:
    before = [[t]] if fresh else [[0], *([abs(x) for x in turn] + [99] for turn in path[:t])]
    logprobs = [SURE if token < 0 else UNSURE for token in path[t]]
    return acted(np.concatenate(before), np.abs(path[t]), logprobs)


# Four leaves: A and B share two tokens of their first turn, A and C the whole first turn but one
# token; D is alone. root -- 1 -- 2 -- 3, 99, 5 (A, 1) |      |     `-- 4        (B, 0) |      `-- 6
# (C, 1) `-- 8                     (D, 0)
TREE = [[[1, 2, 3], [5]], [[1, 2, 4]], [[1, 6]], [[8]]]
OUTCOMES = [1.0, 0.0, 1.0, 0.0]


def test_segments_end_where_trajectories_part_also_inside_a_turn() -> None:
    tree = segments(leaves(TREE, OUTCOMES))
    # A 1 | 2 | 3, 5; B 1 | 2 | 4; C 1 | 6; D 8: A alone is one segment over the end of its turn
    abc, ab, a, _, _, _, b, _, c, d = of = tree.of.tolist()
    assert of == [abc, ab, a, a, abc, ab, b, abc, c, d]
    assert len(set(of)) == 6
    assert tree.leaves[[abc, ab, a, b, c, d]].tolist() == [3, 2, 1, 1, 1, 1]
    root = int(tree.parent[abc])
    assert tree.parent[[root, ab, a, b, c, d]].tolist() == [-1, abc, ab, ab, abc, root]
    assert (root, tree.leaves[root]) == (0, 4)
    value = tree.mean(np.array(OUTCOMES))
    assert_allclose(value[[root, abc, ab]], [0.5, 2 / 3, 0.5])
    weighted = tree.mean(np.array(OUTCOMES), np.array([1.0, 3.0, 1.0, 1.0]))
    assert_allclose(weighted[[root, abc, ab]], [2 / 6, 2 / 5, 0.25])


def test_a_turn_with_its_own_prompt_is_shared_only_if_all_turns_before_it_are() -> None:
    same, other = [[[1], [5]], [[1], [5]]], [[[1], [5]], [[2], [5]]]
    # what all share is the root's
    assert segments(leaves(same, [0, 1], fresh=True)).of.tolist() == [0, 0, 0, 0]
    assert len(set(segments(leaves(other, [0, 1], fresh=True)).of.tolist())) == 2


def white(raw: list[float]) -> np.ndarray:
    return (np.array(raw) - np.mean(raw)) / np.std(raw, ddof=1)


GROUPED, WHOLE = leaves(TREE, OUTCOMES, groups=[1, 1, 1, 2]), leaves(TREE, OUTCOMES)
WEIGHED = with_column(WHOLE, weight=[np.nan, 1 / 8, 1 / 8, 1 / 4, 1 / 2])
SURELY = leaves([[[1, -2]], [[3, 4]]], [1.0, 0.0])
VALUED = with_column(leaves([[[1, 2], [3]], [[4]]], [1.0, 0.0]), mc_value=[0.25, 0.75, 0.5])

KNOWN: list[tuple[str, dict[str, Any], TurnTable, Any]] = [
    # Tree 1 has outcomes 1, 0, 1; tree 2 has 0. All: mean 1/2, sample std sqrt(1/3). Tree 1: mean
    # 2/3, sample std sqrt(1/3). A = (1/2 + 1/3) sqrt 3 = 1.4434 (wins), (-1/2 - 2/3) sqrt 3 =
    # -2.0207; D is alone in its tree: -sqrt 3 / 2 + 0.
    ("tree_grpo", {}, GROUPED, [1.4434] * 4 + [-2.0207] * 3 + [1.4434] * 2 + [-0.8660]),
    # Leave one out: wins 1 - 1/3 = 2/3, losses -2/3. V: (A, B) 0, (A, B, C) 2/9, C 2/3, D -2/3.
    # A(1) = 2 (2/9) / sqrt 3 = 0.2566; A(2) = (0 - 2/9) / sqrt 2 = -0.1571; A(3, 5) = 4/3 - 0; B:
    # -4/3; C: 4/3 - 2/9 = 10/9; D: -4/3.
    ("treerl", {"form": "paper"}, WHOLE,
     [0.2566, -0.1571, 1.3333, 1.3333, 0.2566, -0.1571, -1.3333, 0.2566, 1.1111, -1.3333]),
    # U: (A, B, C) 2/9 / sqrt 3 = 0.1283, (A, B) 0, A 2/3, B -2/3, C 2/3, D -2/3. A = 2 U(s) -
    # U(parent): ABC 0.2566, AB -0.1283, A 4/3, B -4/3, C 4/3 - 0.1283 = 1.2050, D -4/3.
    ("treerl", {}, WHOLE,
     [0.2566, -0.1283, 1.3333, 1.3333, 0.2566, -0.1283, -1.3333, 0.2566, 1.2050, -1.3333]),
    # Differences to the means of root (1/2, 4 leaves), ABC (2/3, 3 leaves), AB (1/2, 2 leaves),
    # each weighted by its leaves: A: (4 (1/2) + 3 (1/3) + 2 (1/2)) / 9 = 4/9; B: (-2 - 2 - 1) / 9 =
    # -5/9; C: (2 + 1) / 7 = 3/7; D: -1/2.
    ("treepo", {"weighting": "size"}, WHOLE,
     white([4 / 9] * 4 + [-5 / 9] * 3 + [3 / 7] * 2 + [-1 / 2])),
    # A: (1/2 + 1/3 + 1/2) / 3 = 4/9; B: (-1/2 - 2/3 - 1/2) / 3 = -5/9; C: (1/2 + 1/3) / 2 = 5/12;
    # D: -1/2.
    ("treepo", {}, WHOLE, white([4 / 9] * 4 + [-5 / 9] * 3 + [5 / 12] * 2 + [-1 / 2])),
    # V: root 1/2, ABC 2/3, AB 1/2. A(1) = 1/6, A(2) = -1/6, A(3, 5) = 1/2, B: -1/2, C: 1/3, D:
    # -1/2.
    ("spo", {"form": "paper", "whiten": False}, WHOLE,
     [1 / 6, -1 / 6, 1 / 2, 1 / 2, 1 / 6, -1 / 6, -1 / 2, 1 / 6, 1 / 3, -1 / 2]),
    # All: mean 1/2, std sqrt(1/2), so +-0.7071; trees of one leaf add 0
    ("tree_grpo", {}, leaves([[[1]], [[2]]], [1.0, 0.0], groups=[1, 2]), [0.7071, -0.7071]),
    # The root has two children (ABC, D), ABC has two (AB, C), AB has two: weights 1/8, 1/8, 1/4,
    # 1/2. V(AB) = 1/2, V(ABC) = (1/2 + 1) / 2 = 3/4, V(root) = (3/4 + 0) / 2 = 3/8.
    ("spo", {"form": "paper", "whiten": False}, WEIGHED,
     [3 / 8, -1 / 4, 1 / 2, 1 / 2, 3 / 8, -1 / 4, -1 / 2, 3 / 8, 1 / 4, -3 / 8]),
    # V(root) = 1/2; both leaves earn +-1/2. Token 2 was sampled with probability .99. The rest:
    # 1/2, -1/2, -1/2, mean -1/6, std .5774.
    ("spo", {}, SURELY, [1.1547, 0, -0.5774, -0.5774]),
    ("spo", {"certain": 1.1, "whiten": False}, SURELY, [0.5, 0.5, -0.5, -0.5]),
    # GRPO: +-1/2 / sqrt(1/3) = +-0.8660. ABC: a third of it, 0.2887; AB: 0.
    ("arpo", {"sharing": "hard"}, WHOLE,
     [0.2887, 0, 0.8660, 0.8660, 0.2887, 0, -0.8660, 0.2887, 0.8660, -0.8660]),
    ("vineppo", {"whiten": False}, VALUED, [0.5, 0.5, 0.25, -0.5]),
    # Whitened over the four tokens: mean 3/16, std of the sample 0.4732.
    ("vineppo", {}, VALUED, [0.6604, 0.6604, 0.1321, -1.4527]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "table", "expected"), KNOWN)
def test_known_answers_on_the_tree(
    name: str, options: dict[str, Any], table: TurnTable, expected: Any
) -> None:
    assert_allclose(estimated(table, name, **options).advantages, expected, atol=1e-4)


@pytest.mark.parametrize("most", [1, 3])
def test_spo_as_released_draws_at_most_so_many_segments_of_each_question(most: int) -> None:
    questions = [grown(np.random.default_rng([5, i]), (3, 3)) for i in range(3)]
    batch = released.table(questions)
    result = schemes.load("spo", {"most": most, "certain": 1.1})(batch)
    assert result.trained is not None
    drawn = [
        segments(batch).of[result.trained & batch.per_token(batch.tree == number)]
        for number in range(3)
    ]
    assert [len(set(of.tolist())) for of in drawn] == [most] * 3


@pytest.mark.second
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_the_released_forms_are_those_of_a_recursion_over_the_sampled_tree(seed: int) -> None:
    questions = [grown(np.random.default_rng([seed, i]), (3, 2, 2)) for i in range(3)]
    for theirs, (name, options) in {
        released.spo: ("spo", {"most": 1000}),
        released.treerl: ("treerl", {}),
        released.treepo: ("treepo", {}),
    }.items():
        expected, push = theirs(questions), ours(questions, name, **options)
        for key in {*expected, *push}:
            assert push.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), abs=1e-6)


EQUAL = Node([], [Node([5, 7], outcome=1.0), Node([8], outcome=1.0)])
OTHER = Node([], [Node([1, 2, 4], outcome=1.0), Node([10], outcome=0.0)])


ENVIRONMENT = {"variant": "environment", "step_reward": "outcome", "alpha": 0.0}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("spo", {"form": "paper"}, True),
        ("spo", {}, False),
        ("treepo", {"leave_out_equal": False}, True),
        ("treepo", {}, False),
        ("reinforce_pp", {"column": "outcome"}, True),
        ("reinforce_pp", {"column": "outcome", "leave_out_equal": True}, False),
        ("oprl", ENVIRONMENT | {"base": "reinforce_pp"}, True),
        ("oprl", ENVIRONMENT | {"base": "grpo"}, False),
        ("oprl", ENVIRONMENT | {"base": "rloo"}, False),
    ],
)
def test_a_scheme_says_if_it_pushes_equals(name: str, options: dict[str, Any], says: bool) -> None:
    push, alone = (ours(some, name, **options) for some in ([OTHER, EQUAL], [OTHER]))
    pushed = any(value for (number, *_), value in push.items() if number == 1)
    assert bool(schemes.load(name, options).needs.pushes_equal) == pushed == says
    if "leave_out_equal" in options and not says:
        assert {key: value for key, value in push.items() if value} == alone


def test_arpo_without_sharing_is_grpo_over_the_leaves() -> None:
    np.testing.assert_array_equal(arpo.advantages(WHOLE), grpo.advantages(WHOLE, "outcome"))


def test_tokens_that_a_scheme_leaves_out_are_in_no_mean(tmp_path: Path, llama: Path) -> None:
    some = episodes(1, 0)
    table = table_of(some)
    options = {"most": 2, "certain": 1.1}
    trained = schemes.load("spo", options)(table).trained
    assert trained is not None
    metrics = trainer(
        llama, tmp_path, scheme="spo", scheme_options=options, aggregation="token"
    ).update(some)
    assert metrics["learner/trained_tokens"] == trained.sum() < table.tokens.sum()
    assert metrics["learner/zero_advantage_share"] == 0


@pytest.mark.parametrize(
    ("turns", "sampled", "alpha", "values", "expected"),
    [
        # lambda = max(0, 1 - 4/3) = 0: A is the one-step difference, .6 - .4 over the observation
        ([[1, 2], [3]], [True] * 3, 0.25, [0.1, 0.4, 0.6], [0.3, 0.2, 0.4]),
        # two sampled tokens: lambda = 1/2; what is not sampled is no step
        ([[1, 2, 3]], [True, False, True], 1.0, [0.0, 9.0, 0.0], [1 / 2, 0, 1]),
    ],
)
def test_saos_lambda_grows_with_the_sampled_length_and_its_critic_learns_the_return(
    turns: list[list[int]], sampled: list[bool], alpha: float, values: Any, expected: list[float]
) -> None:
    table = msgspec.structs.replace(
        leaves([turns], [1.0]), sampled=np.array(sampled), token_scores={"value": np.array(values)}
    )
    made = estimated(table, "sao", alpha=alpha, whiten=False)
    assert_allclose(made.advantages, expected)
    assert made.returns is not None
    assert_allclose(made.returns[sampled], 1)


@pytest.mark.parametrize("name", ["tree_grpo", "treerl", "treepo", "spo", "arpo"])
@given(seed=st.integers(0, 2**16), outcome=st.sampled_from([0.0, 1.0, -0.3]))
def test_equal_outcomes_teach_nothing(name: str, seed: int, outcome: float) -> None:
    rng = np.random.default_rng(seed)
    paths = [rng.integers(1, 3, (int(rng.integers(1, 3)), 2)).tolist() for _ in range(5)]
    made = estimated(leaves(paths, [outcome] * 5), name)
    assert_allclose(made.advantages, 0, atol=1e-9)


@pytest.mark.parametrize("name", ["tree_grpo", "treerl", "treepo", "spo", "arpo", "sao"])
def test_a_leaf_without_its_outcome_changes_no_other_and_gets_nothing(name: str) -> None:
    paths, outcomes = [*TREE[:3], [[2, 9], [4]], *TREE[3:]], [1.0, 0.0, 1.0, np.nan, 0.25]
    table = leaves(paths, outcomes)
    values = np.random.default_rng(3).random(int(table.tokens.sum()))
    table = msgspec.structs.replace(table, token_scores={"value": values})
    gone = table.trajectory == 3
    lacking, without = (estimated(some, name).advantages for some in (table, table.only(~gone)))
    tokens = table.per_token(gone)
    assert np.abs(without).max() > 0.1
    assert_allclose(lacking[~tokens], without, atol=1e-12)
    assert (lacking[tokens] == 0).all()
