"""What is measured of one question: the exact match of methods.md 1.7, its two published variants, F1, and what the answer took."""

from collections.abc import Sequence

from judges.exact_match import exact_match, extract_answer, f1
from scheduler.tree import Node, Tree

MEASURES = (
    "em", "f1", "em_two_blocks", "em_slate", "answered", "searches",
    "response_tokens", "tokens_with_observations", "prompt_tokens",
)  # fmt: skip
TOKENS = MEASURES[-3:]
"""Counted in the model's own tokens; an endpoint's journal holds bytes, so it has none of these."""
COUNTS = ("searches", *TOKENS)
"""Measures that are no shares."""
MOST_TAGS = 10
"""Answer tags beyond which SLATE's scorer gives a quarter."""


def score(tree: Tree, golds: Sequence[str], searches: int) -> dict[str, float]:
    """The measures of a finished question. The last chosen action ends the response; its path holds prompt and observations."""
    final = tree.actions()[-1]
    path = tree.path(final)
    prompt = "".join(node.text for node in path if node.kind == "prompt")
    own = "".join(_said(node, path) for node in path)
    transcript = "".join(node.text for node in path if node.kind != "prompt") + _closing(final)
    gold = list(golds)
    answer = extract_answer(own)
    em = exact_match(answer, gold) if answer is not None else 0.0
    by_two = extract_answer(prompt + transcript, least_blocks=2)
    tags = max(transcript.count("<answer>"), transcript.count("</answer>"))
    nodes = list(tree.nodes.values())
    response = sum(len(node.tokens) for node in nodes if node.kind == "action")
    observed = sum(len(node.tokens) for node in nodes if node.kind == "observation")
    return {
        "em": em,
        "f1": f1(answer, gold) if answer is not None else 0.0,
        "em_two_blocks": exact_match(by_two, gold) if by_two is not None else 0.0,
        "em_slate": em / 4 if tags > MOST_TAGS else em,
        "answered": float(answer is not None and not final.forced),
        "searches": float(searches),
        "response_tokens": float(response),
        "tokens_with_observations": float(response + observed),
        "prompt_tokens": float(sum(len(node.tokens) for node in nodes if node.kind == "prompt")),
    }


def _said(node: Node, path: Sequence[Node]) -> str:
    """A node's part of what the policy wrote: actions, and the opening of a forced answer, which is closed if need be."""
    if node.kind == "action":
        return node.text + _closing(node)
    following = path[path.index(node) + 1 :]
    return node.text if node.kind == "observation" and following and following[0].forced else ""


def _closing(node: Node) -> str:
    """The closing tag that a forced answer lacks (methods.md 1.4: appended)."""
    return "</answer>" if node.forced and "</answer>" not in node.text else ""


def unanswered() -> dict[str, float]:
    """The scores of a question that could not be finished (a prompt longer than the context): no answer block is 0."""
    return dict.fromkeys(("em", "f1", "em_two_blocks", "em_slate", "answered"), 0.0)
