"""The studies of ``coppice dev replicate``: arms, each a config with changed keys, which are
compared with the first one."""

import msgspec


class Arm(msgspec.Struct, frozen=True):
    """One condition of an experiment: a config of configs/ and the keys that are changed in it."""

    config: str
    changes: list[str] = []


class Study(msgspec.Struct, frozen=True):
    """Arms that are compared with the first. measure: the name of the held-out measure. parts:
    further held-out measures, shown with intervals by task. hops: of the default questions, only
    those with so many (0: all). ceiling: the exact best that the measure can be. starts:
    whether each seed has a warm start of its own, and held-out questions too if the task is the
    default one."""

    measure: str
    arms: dict[str, Arm]
    seeds: int = 5
    parts: tuple[str, ...] = ()
    hops: int = 0
    ceiling: float | None = None
    starts: bool = False


_PPR, _SLATE, _TREES = "ppr-cpu", "slate-tiny", "tree-grpo-tiny"
_ALONE = ["actors.count=1", "learner.count=1", "scheduler.max_staleness=0"]
"""Arms are compared with each other: synchronous, so that no arm trains on older data than another.
"""
_WHOLE = [
    *_ALONE, "scheduler.strategy=full", "learner.scheme=slate_full", "actors.max_context=640",
    "learner.aggregation=turn",
]  # fmt: skip
"""A longer context, because a trajectory that outgrows it ends there. The
recorded runs weighed every turn alike; what "auto" takes for slate_full is "trajectory"."""
_GRPO = ["learner.scheme=grpo", "learner.scheme_options.column=outcome"]
_NORM = "learner.scheme_options.normalisation="
_EM_ONLY = [
    "scheduler.judge=slate_em", "scheduler.strategy_options.bonus=0.0",
    "judges.use={exact_match={}, slate_em={}}",
]  # fmt: skip
_SAME_JUDGE = [
    "scheduler.strategy=full", "learner.scheme=slate_full", "actors.max_context=640",
]  # fmt: skip
_OUTCOME_OF_ALL = [
    "scheduler.strategy=full", *_GRPO, "actors.max_context=640", "scheduler.judge=none",
    "judges.use={exact_match={}}",
]  # fmt: skip
_STEPWISE = {
    "SLATE": ([], "5e-4"),
    "GRPO on the outcome": (_OUTCOME_OF_ALL, "1e-3"),
    "GRPO": (_SAME_JUDGE, "5e-4"),
    "SLATE on the outcome": (_EM_ONLY, "5e-4"),
}
"""By arm: its changes, and the best of three learning rates on seed 0."""
_OR = ["learner.scheme=outcome"]
_MC = [
    "learner.scheme=mc_pr", "scheduler.strategy=mc_value",
    "scheduler.strategy_options={continuations=5}",
]  # fmt: skip
_STRICT, _SHORT = ["judges.use.tictactoe.tolerance=0.0"], ["scheduler.updates=24"]
_SOKOBAN = "oprl-sokoban-cpu"


def _stepwise(changes: list[str], rate: str) -> Arm:
    length = ["scheduler.updates=300", "scheduler.evaluation.every=30", f"learner.lr={rate}"]
    return Arm(_SLATE, [*_ALONE, *length, *changes])


def _updates(number: int) -> list[str]:
    """Return the changes that make a run this many updates long, with four evaluations after the
    start's."""
    return [f"scheduler.updates={number}", f"scheduler.evaluation.every={number // 4}"]


def _baseline(scheme: str, options: str) -> list[str]:
    """Return the changes that replace OPRL's scheme by one without a reward model."""
    return [f"learner.scheme={scheme}", f"learner.scheme_options={options}", "learner.prm=null"]


def _labels(flip: float) -> Arm:
    """Return OPRL with the exact labels of steps, wrong for this share of them, as step scores."""
    options = "{base='rloo', variant='environment', step_reward='label', invalid_penalty=0.0}"
    judge = "coppice.research.flipped:FlippedSokoban"
    return Arm(_SOKOBAN, [
        *_baseline("oprl", options), "scheduler.judge=sokoban_flipped",
        f'judges.use={{"{judge}"={{flip={flip}}}}}',
    ])  # fmt: skip


def _variant(name: str) -> list[str]:
    return [f"learner.scheme_options={{base='rloo', variant='{name}'}}"]


def _game(config: str, updates: list[str]) -> dict[str, Arm]:
    """Return VPR's three arms of a game. updates: those of MC-PR, whose updates cost more."""
    return {"VPR": Arm(config), "OR": Arm(config, _OR), "MC-PR": Arm(config, [*_MC, *updates])}


_ALIKE = ["learner.epochs=1", "learner.entropy_coef=0.01"]
_ON_LAKES = [
    *_ALIKE, "data.environment=coppice.research.lake:Lake", "scheduler.judge=lake",
    'judges.use={"coppice.research.lake:LakeOracle"={}}', "warm_start.steps=400",
    "warm_start.skill=0.5",
]  # fmt: skip
_LAKE = [*_ON_LAKES, "data.options={size=5,turns=14}", "actors.max_context=128"]
_LAKE_8 = [
    *_ON_LAKES, "data.options={size=8,turns=24}", "actors.max_context=192", "warm_start.skill=0.7",
]  # fmt: skip


def _methods(
    world: list[str], questions: dict[str, int], updates: int = 20,
    rates: tuple[str, ...] = ("3e-4", "1e-3"),
) -> dict[str, Arm]:  # fmt: skip
    """Return the methods in a world, each at these learning rates. questions: of an update, so many
    that all methods sample about as many moves."""
    options = {
        "outcome": "{}", "grpo": "{k=8}", "tree-grpo": "{trees=2,nodes=3}",
        "vineppo": "{continuations=4}", "vpr": "{}", "vpr-v2": "{k=4,selection='best-of-k'}",
        "slate": "{k=5}",
    }  # fmt: skip
    arms = dict[str, Arm]()
    for method, count in questions.items():
        length = _updates(12 if method == "vineppo" else updates)
        changes = [*world, *length, f"scheduler.questions_per_update={count}"]
        if method != "vpr":
            changes += [f"method={method}", f"scheduler.strategy_options={options[method]}"]
        for rate in rates:
            arms[f"{method}, {rate}"] = Arm("vpr-sokoban-cpu", [*changes, f"learner.lr={rate}"])
    return arms


_ON_A_LAKE = {"outcome": 64, "grpo": 8, "vpr": 64, "vpr-v2": 16, "slate": 13}
_GROUPS = [
    ("grpo", "{k=4}", 16), ("grpo", "{k=16}", 4), ("slate", "{k=3}", 21), ("slate", "{k=9}", 7),
    ("vineppo", "{continuations=1}", 14), ("vineppo", "{continuations=2}", 8),
]  # fmt: skip
"""Other groups of a method, and the questions of an update that sample as many moves."""


def _groups() -> dict[str, Arm]:
    """Return the arms of the lake with other groups: as ``_methods`` makes them, at 3e-4."""
    arms = dict[str, Arm]()
    for method, options, count in _GROUPS:
        arm = _methods(_LAKE, {method: count}, rates=("3e-4",))[f"{method}, 3e-4"]
        changes = [*arm.changes, f"scheduler.strategy_options={options}"]
        arms[f"{method}, {options[1:-1]}"] = Arm(arm.config, changes)
    return arms


_ABLE = ["data.options.size=6", "data.options.horizon=15", "warm_start.skill=0.8"]
_PRM = [
    "learner.scheme_options={base='grpo', invalid_penalty=0.0}", "learner.prm.lr=6e-4",
    "learner.prm.beta=1.0",
]  # fmt: skip
"""Twice the policy's rate, as in the paper. Its beta of .05 is for steps of some hundred tokens;
these have about four."""
_BFCL = "bfcl-cpu"
_TTT, _SUDOKU, _MINES = "vpr-tictactoe-cpu", "vpr-sudoku-cpu", "vpr-minesweeper-cpu"
_OUTCOME = "{column='outcome'}"

_PPR_ARMS = {
    "ReNorm": Arm(_PPR),
    "ReNorm, batch means": Arm(_PPR, [f"{_NORM}sample"]),
    "Rescale": Arm(_PPR, [f"{_NORM}rescale"]),
    "Reduced": Arm(_PPR, [f"{_NORM}reduced"]),
    "w/o Norm": Arm(_PPR, [f"{_NORM}none"]),
    "outcome only": Arm(_PPR, ["learner.scheme=gae"]),
}

STUDIES = {
    "ppr": Study("em", _PPR_ARMS),
    # the paper's sets are mostly of one hop
    "ppr-one-hop": Study("em", {
        name: Arm(arm.config, [*arm.changes, *_updates(48)]) for name, arm in _PPR_ARMS.items()
    }, hops=1),
    "slate": Study("em", {
        "SLATE": Arm(_SLATE, _ALONE),
        "(a) whole trajectories": Arm(_SLATE, _WHOLE),
        "(b) rule rewards": Arm(_SLATE, [*_ALONE, "judges.use.slate_rules.query=format"]),
        "(c) exact match only": Arm(_SLATE, [*_ALONE, *_EM_ONLY]),
        "k = 1": Arm(_SLATE, [*_ALONE, "scheduler.strategy_options.k=1"]),
        "k = 3": Arm(_SLATE, [*_ALONE, "scheduler.strategy_options.k=3"]),
        "k = 7": Arm(_SLATE, [*_ALONE, "scheduler.strategy_options.k=7"]),
    }),
    # five candidates of a step or five trajectories of a question, from one start, each at the best
    # of three rates
    "slate-grpo": Study("em", {
        name: _stepwise(changes, best) for name, (changes, best) in _STEPWISE.items()
    }, seeds=10),
    "slate-starts": Study("em", {
        name: _stepwise(changes, best) for name, (changes, best) in _STEPWISE.items()
        if name != "SLATE on the outcome"
    }, starts=True),
    "slate-grpo-rates": Study("em", {
        f"{name}, {rate}": _stepwise(changes, rate)
        for name, (changes, best) in _STEPWISE.items() for rate in ("5e-4", "1e-3", "2e-3")
        if rate != best
    }, seeds=1),
    "slate-135m": Study("em", {
        "SLATE": Arm("slate-cpu", ["actors.count=1", "learner.count=1", "threads=1"])
    }, seeds=3, parts=("em_1_hop", "em_2_hop", "searches", "valid")),
    # each arm stops near 300,000 sampled tokens, by the costs of docs/methods-table.md
    "trees": Study("em", {
        "SLATE": Arm(_SLATE, [*_ALONE, *_updates(108)]),
        "Tree-GRPO": Arm(_TREES, [*_ALONE, *_updates(100)]),
        # as many whole trajectories as Tree-GRPO has leaves
        "GRPO": Arm(_TREES, [
            *_ALONE, *_updates(88), "scheduler.strategy=full", "scheduler.strategy_options.k=6",
            *_GRPO,
        ]),
        "VinePPO": Arm("vineppo-tiny", [*_ALONE, *_updates(28)]),
        "PPR": Arm(_PPR, _updates(112)),
        # trains on arrival, so its data may be stale
        "SAO": Arm("sao-tiny", [*_ALONE[:2], *_updates(112)]),
    }),
    # about 40 sampled trajectories, or candidates of each step, in every update of every arm
    "bfcl": Study("return", {
        "SLATE": Arm(_BFCL, _ALONE),
        "GRPO": Arm(_BFCL, [*_ALONE, "method=grpo"]),
        # six leaves of a question
        "Tree-GRPO": Arm(_BFCL, [*_ALONE, "method=tree-grpo", "scheduler.questions_per_update=7"]),
        # turn rewards over the trajectories of GRPO: those of one question share their prompt
        "VPR": Arm(_BFCL, [
            *_ALONE, "method=vpr", "scheduler.judge=bfcl", "scheduler.strategy=full",
            "scheduler.strategy_options={k=5}",
        ]),
    }, seeds=3, parts=("simple_python", "multiple", "live_simple", "multi_turn_base", "valid")),
    "oprl-sokoban": Study("success", {
        "OPRL on RLOO": Arm(_SOKOBAN),
        "RLOO": Arm(_SOKOBAN, _baseline("rloo", _OUTCOME)),
        "GRPO": Arm(_SOKOBAN, _baseline("grpo", _OUTCOME)),
        "REINFORCE++": Arm(_SOKOBAN, _baseline("reinforce_pp", _OUTCOME)),
        "GiGPO": Arm(_SOKOBAN, _baseline("gigpo", "{column='step_reward'}")),
        "PRIME": Arm(_SOKOBAN, [
            "learner.scheme=prime", "learner.scheme_options={}", "learner.prm.loss=cross_entropy",
        ]),
        "OPRL, reference behaviour": Arm(_SOKOBAN, ["learner.prm.reference=behaviour"]),
        "OPRL, merged": Arm(_SOKOBAN, _variant("merged")),
        "OPRL, token": Arm(_SOKOBAN, _variant("token")),
        "OPRL, process": Arm(_SOKOBAN, _variant("process")),
        "OPRL, environment": Arm(_SOKOBAN, _baseline(
            "oprl", "{base='rloo', variant='environment', step_reward='step_reward'}"
        )),
    }),
    # how well must a step reward know before it helps?
    "oprl-threshold": Study("success", {
        "RLOO": Arm(_SOKOBAN, _baseline("rloo", _OUTCOME)),
        **{f"labels, {flip:.0%} wrong": _labels(flip) for flip in (0.0, 0.1, 0.2, 0.3, 0.4)},
    }),
    # settings in which the reward model can know more than its policy; all without OPRL's penalty
    "oprl-able": Study("success", {
        "GRPO": Arm(_SOKOBAN, [*_ABLE, *_baseline("grpo", _OUTCOME)]),
        "OPRL on GRPO": Arm(_SOKOBAN, [*_ABLE, *_PRM]),
        "OPRL on GRPO, where it knows more": Arm(_SOKOBAN, [
            *_ABLE, *_PRM, "learner.prm.only_better=true",
        ]),
    }, seeds=20),
    "vpr-tictactoe": Study("return", _game(_TTT, _SHORT)),
    "vpr-sudoku": Study("success", _game(_SUDOKU, _SHORT)),
    "vpr-minesweeper": Study("success", {
        **_game(_MINES, ["scheduler.updates=16"]),
        # four candidates of a state, of which one is played: as many sampled moves
        "VPR v2": Arm(_MINES, ["method=vpr-v2", "scheduler.questions_per_update=16"]),
    }),
    # the outcome alone for the first four, the oracle's step rewards for the others
    "lake": Study("success", _methods(_LAKE, {
        "outcome": 64, "grpo": 8, "tree-grpo": 10, "vineppo": 4, "vpr": 64, "vpr-v2": 16,
        "slate": 13,
    }), seeds=3, ceiling=0.905),
    "lake-rates": Study("success", _methods(
        _LAKE, _ON_A_LAKE, rates=("1e-4", "1e-3")
    ), seeds=3, ceiling=0.905),
    "lake-groups": Study("success", _groups(), seeds=2, ceiling=0.905),
    "lake-long": Study("success", _methods(
        _LAKE, {"outcome": 64, "grpo": 8, "vpr": 64, "slate": 13}, updates=60, rates=("3e-4",)
    ), seeds=2, ceiling=0.905),
    "lake-starts": Study("success", _methods(
        _LAKE, _ON_A_LAKE, rates=("3e-4",)
    ), seeds=10, ceiling=0.905, starts=True),
    "lake-8": Study("success", _methods(_LAKE_8, {
        "outcome": 64, "grpo": 8, "tree-grpo": 10, "vpr": 64, "vpr-v2": 16, "slate": 13,
    }, updates=40), seeds=2, ceiling=0.836),
    "sokoban-6": Study("success", _methods(_ALIKE, {
        "outcome": 64, "grpo": 8, "tree-grpo": 10, "vpr": 64, "vpr-v2": 16, "slate": 13,
    }, updates=60, rates=("3e-4", "1e-3", "1e-4")), seeds=3, ceiling=1.0),
    "vpr-oracles": Study("return", {
        "minimax": Arm(_TTT, ["judges.use.tictactoe={kind='minimax'}", *_SHORT]),
        "MCTS 1000x10, tolerance 0.1": Arm(_TTT, _SHORT),
        "MCTS 100x10, tolerance 0": Arm(
            _TTT, [*_STRICT, "judges.use.tictactoe.simulations=100", *_SHORT]
        ),
        "MCTS 10x1, tolerance 0": Arm(_TTT, [
            *_STRICT, "judges.use.tictactoe.simulations=10", "judges.use.tictactoe.rollouts=1",
            *_SHORT,
        ]),
    }),
}  # fmt: skip
