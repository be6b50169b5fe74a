"""The warm start of function calling writes references as they would be sampled."""

from pathlib import Path

import numpy as np
import pytest

from coppice.actors.environments.base import HELD_OUT_SEEDS
from coppice.actors.environments.bfcl.calls import write
from coppice.actors.environments.bfcl.environment import DONE, Bfcl
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.references import references


@pytest.mark.usefixtures("bfcl_wheel")
def test_references_are_conversations_that_end_every_user_turn(llama: Path) -> None:
    environment, text = Bfcl(["multi_turn_base"], documents="signatures"), Text(str(llama))
    examples = references(environment, text, "</s>", 12, 3)
    replies = [text.decode(np.array(one.tokens[one.start :])) for one in examples]
    task = environment.task(HELD_OUT_SEEDS.stop + 3)
    assert task.id in environment.sides[0]
    first, *_ = environment.board.entry(task.id).answer
    assert replies[: len(first) + 1] == [*(write("python", [call]) for call in first), DONE]
    assert examples[1].tokens[: len(examples[0].tokens)] == examples[0].tokens
    assert all(text.encode("</s>").tolist() == one.tokens[-1:] for one in examples)
