"""Looks back at journaled turns with what a run has: its advantage scheme, or another one, its
newest policy and its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coppice.learner import schemes
from coppice.learner.config import LearnerConfig, LearnerProcess, LoraConfig
from coppice.learner.update.objective import shaped
from coppice.learner.update.table import TurnTable, build
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.wire import published
from coppice.wire.messages import TrainGroup, Turn

Places = list[tuple[int, int]]
"""The tree and the node of each row of a table."""
AT_ONCE = 16
"""Trees whose tokens are packed for one pass of the policy, as in an update."""


def learner(run: Path) -> LearnerProcess | None:
    """Return the learner's process file of a run folder, or None if there is none."""
    file = run / "processes" / "learner.json"
    return msgspec.json.decode(file.read_bytes(), type=LearnerProcess) if file.is_file() else None


def turns(journal: Journal, rows: Sequence[TreeRow]) -> tuple[TurnTable, Places]:
    """Return the turns of all groups of the trees ``rows``, as the learner received them."""

    def grouped(tree: Tree) -> list[TrainGroup]:
        return [TrainGroup(g, tree.id, [], journal.turns(g)) for g, _ in journal.groups(tree.id)]

    return _built(journal, rows, grouped)


def _built(journal: Journal, rows: Sequence[TreeRow], grouped: Any) -> tuple[TurnTable, Places]:
    groups: list[TrainGroup] = []
    nodes = {}
    for row in rows:
        tree = Journal.tree(journal, row)
        groups += grouped(tree)
        for node in tree.nodes.values():
            nodes[tree.id, node.id] = node.travels(journal.pictures(node.tokens))
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

    scheme: None stands for the run's own scheme and options. Schemes that compare over the batch
    see ``rows`` as one batch. Raises ValueError for a scheme that reads values of the learner's
    models, which a journal lacks.
    """
    own = (config.scheme, config.scheme_options)
    of = schemes.load(scheme, options) if scheme else schemes.load(*own)
    if of.needs.models or (config.kl_reward_coef and not scheme):
        raise ValueError(
            f"scheme {of.name!r} reads values of the learner's models, which are not in a journal"
        )
    table, places = turns(journal, rows)
    if not len(table):
        return {}
    lacking = of.needs.columns - table.scores.keys()
    if lacking:
        raise ValueError(
            f"scheme {of.name!r} reads {sorted(lacking)}; the turns have {sorted(table.scores)}"
        )
    kept = of.trains(table)
    table = table.only(kept)
    places = [place for place, keep in zip(places, kept, strict=True) if keep]
    column = of.needs.reward_column
    if column and not scheme:
        table = shaped(table, column, config)
    tokens = np.maximum(1, table.per_turn(np.ones(len(table.mask()))))
    return dict(zip(places, (table.per_turn(of(table).advantages) / tokens).tolist(), strict=True))


class Replayed(Journal):
    """A journal, open for reading, whose trees have a score ``advantage`` from the run's scheme
    where no strategy has written one.

    Trees that were trained together are one batch. A scheme that reads the learner's models (a
    critic, a reward model) gives none.
    """

    def __init__(self, path: Path, beside: Sequence[Path] = ()):
        super().__init__(path, readonly=True, others=beside)
        self._process = learner(path.parent)
        self._known: dict[int, dict[tuple[int, int], float]] = {}

    def tree(self, row: TreeRow) -> Tree:
        """The tree of a row, with its advantages."""
        tree = super().tree(row)
        trained = [version for _, version in self.groups(row.id) if version is not None]
        written = any("advantage" in node.scores for node in tree.nodes.values())
        if self._process is None or not trained or written:
            return tree
        if trained[0] not in self._known:
            self._known = {trained[0]: self._advantages(trained[0])}
        for node in tree.nodes.values():
            value = self._known[trained[0]].get((tree.id, node.id))
            if value is not None:
                node.scores = {**node.scores, "advantage": value}
        return tree

    def _advantages(self, version: int) -> dict[tuple[int, int], float]:
        assert self._process is not None
        of_update = "id IN (SELECT tree FROM groups WHERE trained=?) AND status!='replaced'"
        batch = self.trees(of_update, version)
        try:
            return advantages(self, batch, self._process.learner)
        except ValueError:
            return {}


def apply_version(model: Any, base: str, folder: Path) -> None:
    """Copy the weights of a version's folder into ``model``, whose folder is ``base``. Raises
    InfrastructureFault for weights that fail their digest."""
    from coppice.actors.engines import weights  # with torch, which takes seconds

    written = msgspec.json.decode((folder / published.NAME).read_bytes(), type=published.Manifest)
    weights.apply(model, Path(base), *weights.verified_file(folder, written.digest))


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
    if process is None:
        raise ValueError(
            f"--newest needs the folder of the run: no processes/learner.json is in {run}"
        )

    def sampled(tree: Tree) -> list[TrainGroup]:
        nodes = tree.nodes.values()
        actions = [node for node in nodes if node.logprobs is not None and len(node.tokens)]
        turns = [Turn(node.id, 0, node.step, {}) for node in actions]
        return [TrainGroup(tree.id, tree.id, [], turns)]

    version, folder = versions.chosen(run, None)
    ranks = Ranks(timeout_s=60.0)
    config = process.learner
    policy = TreeModel(process.model, config, process.temperature, ranks, lora=LoraConfig(rank=0))
    if folder is not None:
        apply_version(policy.causal, process.model, folder)
    known: dict[tuple[int, int], np.ndarray] = {}
    with policy.inference():
        for start in range(0, len(rows), AT_ONCE):
            table, places = _built(journal, rows[start : start + AT_ONCE], sampled)
            if len(table):
                batch = Rows(table.paths)
                steps = plan(batch.trie, range(len(table)), config.micro_tokens, ranks)
                values = sweep(batch, steps, ranks, lambda forest: policy.read(forest)[0])
                known |= zip(places, (values[span] for span in batch.spans), strict=True)
    return version, known


# ----------------------------------------------------------------------------------------------
# tokens


def tokenizer(run: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's policy, or None if the run's folder or the policy's is not
    there."""
    process = learner(run)
    file = Path(process.model) / "tokenizer.json" if process is not None else None
    return Tokenizer.from_file(str(file)) if file is not None and file.is_file() else None


def pieces(words: Tokenizer | None, tokens: np.ndarray) -> list[str]:
    """Return the text of each token, or its number without a tokenizer. Of a character of several
    tokens, the last one has the text."""
    if words is None:
        return [str(token) for token in tokens.tolist()]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(words, int(token)) or "" for token in tokens]


def token_lines(words: Tokenizer | None, node: Node, newest: np.ndarray | None) -> list[str]:
    """Return one line per token of an action: its log-probability when it was sampled, that under
    the newest policy if it is known, its text."""
    if node.logprobs is None or not len(node.logprobs):
        return []
    columns = [node.logprobs] if newest is None else [node.logprobs, newest]
    values = ["".join(f"{value:9.4f}" for value in row) for row in zip(*columns, strict=True)]
    shown = pieces(words, node.tokens)
    head = "  sampled" + ("   newest" if newest is not None else "") + "  token"
    return [head, *(f"{row}  {piece!r}" for row, piece in zip(values, shown, strict=True))]
