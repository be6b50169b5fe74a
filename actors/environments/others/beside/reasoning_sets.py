"""The sets of reasoning-gym (``pip install reasoning-gym``) in a process of their own: some
evaluate what the policy writes as a formula, which may take for ever, and some make other questions
of the same seed where Python's hashes differ."""

import copy
import functools
import json
from typing import Any


class Reasoning:
    """name: of a set. The other arguments are its settings. The action is the answer, and the
    reward its score."""

    copies = False  # a question is in the cache below

    def __init__(self, name: str, **config: Any):
        self.ask = functools.partial(_asked, name, json.dumps(config))

    def begin(self, seed: int) -> str:
        """Return the question."""
        self.questions, self.entry = self.ask(seed)
        return self.entry["question"]

    def turn(self, action: str) -> tuple[str, float, bool, float]:
        """Score an answer; one at which the library fails scores 0."""
        try:
            score = float(self.questions.score_answer(action, copy.deepcopy(self.entry)))
        except Exception:  # noqa: BLE001
            score = 0.0
        return "", score, True, float(score >= 1)


@functools.lru_cache(256)
def _asked(name: str, config: str, seed: int) -> tuple[Any, dict[str, Any]]:
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    questions = reasoning_gym.create_dataset(name, seed=seed, size=1, **json.loads(config))
    return questions, questions[0]
