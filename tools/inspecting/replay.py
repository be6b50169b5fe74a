"""Looks back at journaled turns with what a run has: its advantage scheme, or another one, its
newest policy and its tokenizer."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coppice.common import shards
from coppice.learner import schemes
from coppice.learner.config import LearnerConfig, LearnerProcess, LoraConfig
from coppice.learner.update.objective import shaped
from coppice.learner.update.table import TurnTable, build
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.evaluating.judged import saved
from coppice.wire import published
from coppice.wire.messages import TrainGroup, Turn

Places = list[tuple[int, int]]
"""The tree and the node of each row of a table."""
AT_ONCE = 16
"""Trees whose tokens are packed for one pass of the policy, as in an update."""


def learner(run: Path) -> LearnerProcess:
    """Return the learner's process file of a run folder. Raises ValueError if there is none."""
    return saved(run / "processes" / "learner.json", LearnerProcess)


def _table(
    journal: Journal, trees: Sequence[Tree], groups: list[TrainGroup]
) -> tuple[TurnTable, Places]:
    nodes = {
        (tree.id, node.id): node.travels(journal.pictures(node.tokens))
        for tree in trees
        for node in tree.nodes.values()
    }
    places = [(group.tree, turn.node) for group in groups for turn in group.turns]
    return build(groups, nodes), places


def advantages(
    journal: Journal,
    rows: Sequence[TreeRow],
    config: LearnerConfig,
    scheme: str = "",
    **options: Any,
) -> dict[tuple[int, int], float]:
    """Return the advantage that a scheme gives each turn of the trees ``rows``, the mean over its
    tokens, by tree and node.

    scheme: "" stands for the run's own scheme and options. Schemes that compare over the batch see
    ``rows`` as one batch. Raises ValueError for a scheme that reads values of the learner's models,
    which a journal lacks.
    """
    own = (config.scheme, config.scheme_options)
    of = schemes.load(*((scheme, options) if scheme else own))
    if of.needs.models or (config.kl_reward_coef and not scheme):
        raise ValueError(
            f"scheme {of.name!r} reads values of the learner's models, which are not in a journal"
        )
    trees = [Journal.tree(journal, row) for row in rows]
    groups = [
        TrainGroup(group, tree.id, [], journal.turns(group))
        for tree in trees
        for group in tree.groups
    ]
    table, places = _table(journal, trees, groups)
    if not len(table):
        return {}
    if lacking := of.needs.columns - table.scores.keys():
        raise ValueError(
            f"scheme {of.name!r} reads {sorted(lacking)}; the turns have {sorted(table.scores)}"
        )
    kept = of.trains(table)
    table = table.only(kept)
    places = [place for place, keep in zip(places, kept, strict=True) if keep]
    if of.needs.reward_column and not scheme:
        table = shaped(table, of.needs.reward_column, config)
    tokens = np.maximum(1, table.per_turn(np.ones(len(table.mask()))))
    return dict(zip(places, (table.per_turn(of(table).advantages) / tokens).tolist(), strict=True))


class Replayed(Journal):
    """A journal, open for reading, whose trees have a score ``advantage`` from the run's scheme
    where no strategy has written one.

    Trees that were trained together are one batch. A scheme that reads the learner's models (a
    critic, a reward model) gives none.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()):
        super().__init__(path, readonly=True, others=others)
        self._advantages: dict[int, dict[tuple[int, int], float]] = {}
        """By version; a page shows trees of many versions in turn."""

    def tree(self, row: TreeRow) -> Tree:
        tree = super().tree(row)
        trained = [version for _, version in self.groups(row.id) if version is not None]
        written = any("advantage" in node.scores for node in tree.nodes.values())
        if not trained or written:
            return tree
        version = trained[0]
        if version not in self._advantages:
            of_update = "id IN (SELECT tree FROM groups WHERE trained=?) AND status!='replaced'"
            batch, self._advantages[version] = self.trees(of_update, version), {}
            with contextlib.suppress(ValueError, KeyError):  # or a node was lost
                found = advantages(self, batch, learner(self.path.parent).learner)
                self._advantages[version] = found
        for node in tree.nodes.values():
            if (value := self._advantages[version].get((tree.id, node.id))) is not None:
                node.scores = {**node.scores, "advantage": value}
        return tree


def opened(run: Path) -> Journal:
    """Return the journals of a run folder as one, or the journal file itself, open for reading,
    with advantages. Raises FileNotFoundError."""
    return Replayed(*shards.journals(run)) if run.is_dir() else Replayed(run, [])


def apply_version(model: Any, base: str, folder: Path) -> None:
    """Copy the weights of a version's folder into ``model``, whose folder is ``base``. Raises
    InfrastructureFault for weights that fail their digest."""
    from coppice.actors.engines import weights  # with torch, which takes seconds

    written = saved(folder / published.NAME, published.Manifest)
    weights.apply(model, Path(base), weights.verified(folder, written.digest))


def newest(
    journal: Journal, rows: Sequence[TreeRow], run: Path
) -> tuple[int, dict[tuple[int, int], np.ndarray]]:
    """Return the newest version whose weights a run holds, and the log-probability of every action
    token of the trees ``rows`` under it, by tree and node, each float32 [tokens].

    They are computed as the learner computes them: with the run's temperature and number type,
    among the tokens that top-p and top-k left. Raises ValueError without the run's folder or
    weights, InfrastructureFault for weights that fail their digest.
    """
    from coppice.learner.model.model import TreeModel  # with torch, which takes seconds
    from coppice.learner.model.ranks import Ranks
    from coppice.learner.update.passes import Rows, plan, sweep
    from coppice.tools.evaluating import versions

    process = learner(run)
    version, folder = versions.chosen(run, None)
    ranks, config = Ranks(timeout_s=60.0), process.learner
    policy = TreeModel(process.model, config, process.temperature, ranks, lora=LoraConfig(rank=0))
    if folder is not None:
        apply_version(policy.causal, process.model, folder)
    values: dict[tuple[int, int], np.ndarray] = {}
    for start in range(0, len(rows), AT_ONCE):
        trees = [Journal.tree(journal, row) for row in rows[start : start + AT_ONCE]]
        groups = []
        for tree in trees:
            sampled = [n for n in tree.nodes.values() if n.logprobs is not None and len(n.tokens)]
            actions = [Turn(node.id, 0, node.step, {}) for node in sampled]
            groups.append(TrainGroup(tree.id, tree.id, [], actions))
        table, places = _table(journal, trees, groups)
        if len(table):
            batch = Rows(table.paths)
            steps = plan(batch.trie, range(len(table)), config.micro_tokens, ranks)
            swept = sweep(batch, steps, policy)
            values |= zip(places, (swept[span] for span in batch.spans), strict=True)
    return version, values


def tokenizer(run: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's policy, or None if the run's folder or the policy's is not
    there."""
    try:
        file = Path(learner(run).model) / "tokenizer.json"
    except ValueError:
        return None
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def pieces(words: Tokenizer | None, tokens: np.ndarray) -> list[str]:
    """Return the text of each token, or its number without a tokenizer. Of a character of several
    tokens, the last one has the text."""
    if words is None:
        return [str(token) for token in tokens.tolist()]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(words, int(token)) or "" for token in tokens]
