"""The measures of one question: the exact match of methods.md 1.7, its two published variants, F1,
and the costs of the answer."""

from collections.abc import Sequence

from coppice.judges.exact_match import exact_match, extract_answer, f1
from coppice.scheduler.growth.tree import Node, Tree

MEASURES = (
    "em", "f1", "em_two_blocks", "em_slate", "answered", "searches",
    "response_tokens", "tokens_with_observations", "prompt_tokens",
)  # fmt: skip
TOKENS = MEASURES[-3:]
"""Measures in the model's own tokens. An endpoint does not have them, because its journal holds
bytes."""
COUNTS = ("searches", *TOKENS)
"""Measures that are counts, not shares."""
MOST_TAGS = 10
"""If a response has more answer tags than this, SLATE's scorer divides its score by four."""


def score(tree: Tree, golds: list[str], searches: int) -> dict[str, float]:
    """The measures of a finished question. The response ends with the last chosen action, whose
    path holds prompt and observations."""
    final = tree.actions()[-1]
    path = tree.path(final)
    prompt = "".join(node.text for node in path if node.kind == "prompt")
    transcript = "".join(node.text for node in path if node.kind != "prompt") + _closing(final)
    answer = extract_answer("".join(_said(node, path) for node in path))
    em = exact_match(answer, golds) if answer is not None else 0.0
    by_two = extract_answer(prompt + transcript, least_blocks=2)
    tags = max(transcript.count("<answer>"), transcript.count("</answer>"))
    nodes = list(tree.nodes.values())
    response = sum(len(node.tokens) for node in nodes if node.kind == "action")
    observed = sum(len(node.tokens) for node in nodes if node.kind == "observation")
    return {
        "em": em,
        "f1": f1(answer, golds) if answer is not None else 0.0,
        "em_two_blocks": exact_match(by_two, golds) if by_two is not None else 0.0,
        "em_slate": em / 4 if tags > MOST_TAGS else em,
        "answered": float(answer is not None and not final.forced),
        "searches": float(searches),
        "response_tokens": float(response),
        "tokens_with_observations": float(response + observed),
        "prompt_tokens": float(sum(len(node.tokens) for node in nodes if node.kind == "prompt")),
    }


def _said(node: Node, path: Sequence[Node]) -> str:
    """The node's text if the policy wrote it: an action, or the opening of a forced answer. A
    missing closing tag is added."""
    if node.kind == "action":
        return node.text + _closing(node)
    following = path[path.index(node) + 1 :]
    return node.text if node.kind == "observation" and following and following[0].forced else ""


def _closing(node: Node) -> str:
    """The closing tag that must be appended to a forced answer, or "" (methods.md 1.4)."""
    return "</answer>" if node.forced and "</answer>" not in node.text else ""
