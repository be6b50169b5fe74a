"""Search-o1 (Li et al., 2025): searches inside one chain of reasoning, with each result condensed
by a separate generation.

The model writes a query inside its reasoning. A second prompt ("reason in documents") gets the
passages, the reasoning so far and the query. The extract that it writes, not the passages, is
inserted, and the reasoning continues. ``budget`` counts the searches that were made. A repeated
query, or one beyond the budget, gets a notice and costs no search; after the second kind of notice
the model replies once more. After ``budget`` + 5 queries of any kind the question ends (the paper's
code: 10 searches, 15 turns).

Simplified: the project's <search> tags and a <result> block replace the paper's markers. There is
no worked example. The second prompt sees the last 2,000 characters of the reasoning, not a
selection of its steps, and is asked without thinking. No answer is forced.
"""

import re

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Node, Tree
from coppice.tools.evaluating.qa.methods import How, ask, documents, filled, say, show, spoken

RETRIEVES = True
REPEATED = "This was searched before: see the result above."
USED_UP = "No more searches can be made. Answer with what is known."
_QUERY = re.compile(r"<search>((?:(?!<search>).)*)</search>\s*$", re.DOTALL)
_STOP = ["</search>", "</answer>"]
_SHOWN_REASONING = 2000
MORE_QUERIES = 5
"""A question may have at most this many more queries than searches."""


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Reason, and search whenever the reasoning asks for it."""
    prompt = filled("search_o1", question=ctx.task.question, budget=str(how.budget))
    node = await ask(tree, ctx, prompt, _STOP)
    searched: set[str] = set()
    result = ""
    for _ in range(how.budget + MORE_QUERIES):
        query = wanted(node.text)
        if query is None or result == USED_UP:
            return
        if query in searched:
            result = REPEATED
        elif len(searched) == how.budget:
            result = USED_UP
        else:
            result = await _condensed(tree, ctx, node, query, how.topk)
            searched.add(query)
        node = await say(
            tree, ctx, show(tree, ctx, node, f"\n<result> {result} </result>\n"), _STOP
        )


async def _condensed(tree: Tree, ctx: Context, node: Node, query: str, topk: int) -> str:
    passages = await ctx.services.retrieve(query, topk)
    reasoning = "".join(above.text for above in tree.path(node) if above.kind != "prompt")[
        -_SHOWN_REASONING:
    ]
    prompt = filled(
        "search_o1_documents", reasoning=reasoning, query=query, documents=documents(passages)
    )
    return spoken((await ask(tree, ctx, prompt, stop=[], thinking=False)).text)


def wanted(text: str) -> str | None:
    """The query at the end of the text, or None."""
    match = _QUERY.search(text)
    return match[1].strip() if match and match[1].strip() else None
