"""A short run on a real SGLang server that takes its weights out of the learner's memory."""

import json
import re
from pathlib import Path

from coppice.scheduler.growth.tree import Tree
from tests.runs import Launch
from tests.sglang_cpu import shared


def test_slate_on_sglang(searching: Path, launch: Launch) -> None:
    own = shared.config()
    sglang = {f"actors.sglang.{name}": getattr(own, name) for name in ("python", "start_timeout_s")}
    for name in ("arguments", "environment"):
        sglang |= {f"actors.sglang.{name}.{key}": v for key, v in getattr(own, name).items()}
    run = launch(
        searching,
        """actors={engine='sglang',count=1,max_batch=8} scheduler.strategy_options.k=4
        scheduler.updates=2 scheduler.questions_per_update=2 scheduler.evaluation.questions=2
        learner.lora={rank=0} learner.publish=memory""",
        *(f"{key}={json.dumps(value)}" for key, value in sglang.items()),
    )
    run.finish()
    run.check(2, 2)
    updates = [record for record in run.records() if "learner/groups" in record]
    assert len(updates) == 2
    # SGLang and the learner agree on the same weights
    assert updates[0]["learner/logprob_gap_max"] < 1e-3
    log = (run.folder / "logs" / "actor-0.log").read_text().splitlines()
    proofs = [
        line.rsplit(" ", 1)[1] for line in log if re.search("version [12] by distributed", line)
    ]
    # SGLang's checksums of two versions that the learner gave out of its memory
    assert len(set(proofs)) == 2
    trees = run.trees()
    assert {version for tree in trees for version in versions(tree)} <= {0, 1, 2}
    # a second step finds the first in the cache
    cached = [n.cached for tree in trees for n in tree.nodes.values() if n.cached is not None]
    assert max(cached) > min(cached)


def versions(tree: Tree) -> set[int]:
    return {int(v) for n in tree.nodes.values() if n.versions is not None for v in n.versions}
