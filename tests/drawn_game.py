"""A game as a library has them, for another Python: it needs the standard library alone."""

import os
import random
import time
from typing import Any


class Drawn:
    """words: that it refuses, fails or waits for, dies of, or ends with."""

    def __init__(self, first: str = "begin"):
        self.first = first
        self.numbers: list[float] = []

    def begin(self, seed: int) -> str:
        self.numbers = [random.random(), seed]
        return self.first

    def turn(self, action: str) -> tuple[Any, ...]:
        print("libraries print", flush=True)
        if action == "bad":
            raise ValueError("no such action")
        if action == "fail":
            raise KeyError("a mistake of the library")
        if action == "die":
            os._exit(3)
        while action == "hang":
            time.sleep(1)
        self.numbers.append(self.numbers[-1] * random.random() + len(action))
        seen = f"{os.getpid() if action == 'process' else ''}{self.numbers}"
        ended = (True, 1.0) if action == "end" else (False,)
        return seen, random.random(), *ended


class Uncopied(Drawn):
    copies = False

    def __deepcopy__(self, memory: Any) -> Any:
        raise AssertionError("it was copied")
