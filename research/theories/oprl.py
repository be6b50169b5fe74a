"""OPRL (arXiv 2509.19199): the implicit step reward beta log(pi_phi / pi_old) at the optimum of its
DPO loss.

Trajectories are the paths of a tree with two decisions of three actions each. Policies have one row
of logits per state. The loss covers the whole population of pairs, so its optimum has no sampling
error. Source: OPRL eq. 1-2, Theorem 3.3, Proposition 3.4; methods.md 5.
"""

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from coppice.research.theories import ClaimRow, differences, show, zero

Array = NDArray[np.float64]
ACTIONS = 3
BETA = 0.5
# tolerance of a fit; L-BFGS leaves errors near 1e-8 where preferences are almost certain
FITTED = 1e-5


class ActionTree(msgspec.Struct, frozen=True):
    """The paths of a tree: states and actions, [paths, 2] each, and the probability of their chance
    events, [paths]."""

    states: NDArray[np.int64]
    actions: NDArray[np.int64]
    chance: Array

    def step_log_probs(self, logits: Array) -> Array:
        """Return log pi(a_t | s_t) on every path, [paths, 2], for the policy with ``logits``,
        [states, 3]."""
        return log_softmax(logits, axis=-1)[self.states, self.actions]

    def probabilities(self, logits: Array) -> Array:
        """Return the probabilities of the paths, [paths]."""
        return self.chance * np.exp(self.step_log_probs(logits).sum(axis=1))


def tree(outcomes: int = 1) -> ActionTree:
    """Return the tree of an action, one of ``outcomes`` equally likely states, and an action. With
    one outcome it is deterministic."""
    first, met, second = (axis.ravel() for axis in np.indices((ACTIONS, outcomes, ACTIONS)))
    states = np.stack([np.zeros_like(first), 1 + outcomes * first + met], axis=1)
    return ActionTree(states, np.stack([first, second], axis=1), np.full(len(first), 1 / outcomes))


def random_logits(paths: ActionTree, rng: np.random.Generator) -> Array:
    """Return the logits of a random policy, [states, 3]."""
    return rng.normal(size=(int(paths.states.max()) + 1, ACTIONS))


def fit(paths: ActionTree, reference: Array, utility_differences: Array) -> Array:
    """Return the logits, [states, 3], of the global optimum of the DPO loss (eq. 2) over all pairs
    of paths of ``reference``.

    ``utility_differences`` [paths, paths]: path i is preferred to path j with probability
    sigmoid(entry (i, j)).
    """
    chances = paths.probabilities(reference)
    weights = torch.from_numpy(np.outer(chances, chances))
    preferred = weights * torch.sigmoid(torch.from_numpy(utility_differences))
    reference_log_probs = torch.from_numpy(paths.step_log_probs(reference))
    states, actions = torch.from_numpy(paths.states), torch.from_numpy(paths.actions)
    logits = torch.from_numpy(reference.copy()).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [logits], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        log_probs = torch.log_softmax(logits, dim=-1)[states, actions]
        log_ratio = (log_probs - reference_log_probs).sum(dim=1)
        margins = BETA * (log_ratio[:, None] - log_ratio[None, :])
        loss = -(preferred * torch.nn.functional.logsigmoid(margins)).sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return logits.detach().numpy()


def step_rewards(paths: ActionTree, phi: Array, old: Array) -> Array:
    """Return the implicit step rewards beta log(pi_phi / pi_old), [paths, 2] (eq. 1)."""
    return BETA * (paths.step_log_probs(phi) - paths.step_log_probs(old))


def deviation(values: Array) -> float:
    """Return the standard deviation over the paths, which is zero when all values are equal."""
    return float(values.std())


def telescoped(
    rng: np.random.Generator, preference_scale: float, outcomes: int = 1
) -> tuple[Array, Array]:
    """Fit with Pr = sigmoid(preference_scale * (R+ - R-)) and sum the step rewards (Theorem 3.3:
    they are R + const). Return the sums and the utilities R, [paths] each. outcomes: states that
    chance may draw after the first action."""
    paths = tree(outcomes)
    old, utilities = random_logits(paths, rng), rng.normal(size=len(paths.states))
    phi = fit(paths, old, preference_scale * (utilities[:, None] - utilities))
    return step_rewards(paths, phi, old).sum(axis=1), utilities


def one_step_gap(rng: np.random.Generator) -> float:
    """Return the largest difference of grad J and -beta grad KL(pi || pi_phi) at pi = pi_old, for
    one decision of five actions."""
    old, phi = rng.normal(size=5), rng.normal(size=5)
    old_log_probs, phi_log_probs = log_softmax(old), log_softmax(phi)
    rewards = BETA * (phi_log_probs - old_log_probs)

    def divergence(logits: Array) -> float:
        return float(np.exp(log_softmax(logits)) @ (log_softmax(logits) - phi_log_probs))

    objective = differences(lambda logits: float(np.exp(log_softmax(logits)) @ rewards), old)
    return float(np.abs(objective + BETA * differences(divergence, old)).max())


def multi_step_gaps(rng: np.random.Generator) -> Array:
    """Return the largest differences from grad J on the tree at pi = pi_old, [3].

    They are those of the reward-to-go form, of -beta grad KL over whole paths, and of the printed
    form (immediate reward only).
    """
    paths = tree()
    old, phi = random_logits(paths, rng), random_logits(paths, rng)
    rewards = step_rewards(paths, phi, old)

    def divergence(logits: Array) -> float:
        ratio = (paths.step_log_probs(logits) - paths.step_log_probs(phi)).sum(axis=1)
        return float(paths.probabilities(logits) @ ratio)

    totals = rewards.sum(axis=1)
    gradient = differences(lambda logits: float(paths.probabilities(logits) @ totals), old)
    to_go = score_form(paths, old, np.stack([totals, rewards[:, 1]], axis=1))
    whole_paths = -BETA * differences(divergence, old)
    forms = to_go, whole_paths, score_form(paths, old, rewards)
    return np.array([np.abs(form - gradient).max() for form in forms])


def score_form(paths: ActionTree, logits: Array, weights: Array) -> Array:
    """Return E over paths of sum_t weights_t grad log pi(a_t | s_t), [states, 3]; ``weights``
    [paths, 2]."""
    policy = np.exp(log_softmax(logits, axis=-1))
    scores = np.eye(ACTIONS)[paths.actions] - policy[paths.states]
    gradient = np.zeros_like(logits)
    chances = paths.probabilities(logits)[:, None, None]
    np.add.at(gradient, paths.states, chances * weights[..., None] * scores)
    return gradient


def rows(seed: int = 0) -> list[ClaimRow]:
    """Return OPRL's rows of methods.md 5, and one row on random transitions."""
    rng = np.random.default_rng(seed)
    return [*_theorem_3_3(rng), *_proposition_3_4(rng), *_bound(rng)]


def _theorem_3_3(rng: np.random.Generator) -> list[ClaimRow]:
    fitted, utility = telescoped(rng, 1.0)
    total, paper_utility = telescoped(rng, 1 / BETA)
    against_r = deviation(total - paper_utility)
    predicted = (1 / BETA - 1) * deviation(paper_utility)
    by_chance, chance_utility = telescoped(rng, 1.0, outcomes=2)
    chance = deviation(by_chance - chance_utility)
    std = "OPRL Thm 3.3: std of sum r_phi - R"
    paper_claim, near = f"{std}, Pr = sigmoid(dR/beta), beta={BETA}: not R", against_r - predicted
    return [
        zero(f"{std}, Pr = sigmoid(dR)", deviation(fitted - utility), FITTED),
        ClaimRow(paper_claim, show(against_r), show(predicted), abs(near) < FITTED),
        zero(f"{std}/beta, the same fit", deviation(total - paper_utility / BETA), FITTED),
        ClaimRow(f"{std}, random transitions: varies", show(chance), "> 0", chance > 0.01),
    ]


def _proposition_3_4(rng: np.random.Generator) -> list[ClaimRow]:
    to_go, divergence, immediate = (float(gap) for gap in multi_step_gaps(rng))
    claim = "OPRL Prop 3.4: grad J less the printed immediate-reward form, two steps: off"
    whole = "OPRL Prop 3.4: grad J + beta grad KL over whole paths, two steps"
    return [
        zero("OPRL Prop 3.4: grad J + beta grad KL, one step", one_step_gap(rng), 1e-9),
        zero("OPRL Prop 3.4: grad J less the reward-to-go form, two steps", to_go, 1e-9),
        zero(whole, divergence, 1e-9),
        ClaimRow(claim, f"{immediate:.4f}", "> 0", immediate > 1e-4),
    ]


def _bound(rng: np.random.Generator) -> list[ClaimRow]:
    old, phi = log_softmax(2 * rng.normal(size=(2, 10_000, ACTIONS)), axis=-1)
    ratio, bound = phi - old, -old.min(axis=1, keepdims=True)
    bound_of_both = -np.minimum(old, phi).min(axis=1, keepdims=True)
    upper, absolute = float((ratio / bound).max()), float((np.abs(ratio) / bound).max())
    wider = float((np.abs(ratio) / bound_of_both).max())
    claims = (
        "OPRL Prop 3.4: largest r over beta log(1/eps), 10,000 policies",
        "OPRL Prop 3.4: largest |r| over it: the printed bound fails",
        "OPRL Prop 3.4: largest |r| with eps of both policies",
    )
    return [
        ClaimRow(claims[0], show(upper), "<= 1", upper <= 1),
        ClaimRow(claims[1], show(absolute, 2), "> 1", absolute > 1),
        ClaimRow(claims[2], show(wider), "<= 1", wider <= 1),
    ]
