"""The step oracle of the Berkeley Function Calling Leaderboard: does a reply move the state towards
the reference's?"""

import functools
from collections import Counter

import msgspec

from coppice.actors.environments.bfcl.calls import FunctionCall
from coppice.actors.environments.bfcl.environment import Bfcl, BfclState, Script
from coppice.actors.environments.bfcl.leaderboard import BfclTask
from coppice.judges.base import Oracle
from coppice.wire.messages import JudgedTurn, Judgement

FAR = 10**6
"""The distance of a state that cannot be compared, because a directory holds itself."""


class BfclOracle(Oracle):
    """Scores a reply by the distance to the reference's end of the user turn. The distance by way
    of a point on the reference's path is the number of public values in which the states differ
    there, of the path's results that are missing, and of the calls that are left; the least counts.

    Column "reward" in tasks of several turns: 1 for a needed call (the distance falls) and for
    ending a user turn when nothing is missing; -1 for a wrong one (the distance rises, or calls
    fail and it does not fall), for stalling (calls made before, with the same results), for
    unreadable calls, and for ending a turn too early; else 0, harmless. In tasks of one turn: 1 if
    the checker accepts the reply, 0 for the right functions with wrong values, else -1. Column
    "distance": before the reply. wheel: see the environment.
    """

    name = "bfcl"
    environments = ("bfcl",)
    columns = ("reward", "distance")

    def __init__(self, wheel: str = ""):
        self.environment = Bfcl(wheel=wheel)
        self._path = functools.lru_cache(256)(self._followed)

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        state, board = msgspec.convert(turn.state, BfclState), self.environment.board
        entry, script = board.entry(state.task), self.environment.script(state)
        after = self.environment.script(state, turn.response)
        if not entry.classes:
            verdict = board.verdict(entry, after.turns)
            called = Counter(call.name for call in _calls(after))
            named = called and called == Counter(name for one in entry.answer for name in one)
            reward, why = (0.0 if named else -1.0), verdict.get("error_type")
            reward, why = (1.0, "accepted") if verdict["valid"] else (reward, why)
            return Judgement({"reward": reward}, explanation=why)
        number = len(script.turns) - 1
        distance, before = self._distance(entry, number, script)
        later, results = self._distance(entry, number, after)
        failed = any(one.startswith(("Error d", '{"error"')) for one in results[len(before) :])
        pairs = [*zip(_calls(after), results, strict=True)]
        stalled = {*pairs[len(before) :]} <= {*pairs[: len(before)]}
        acted = bool(script.turns[number]) or not entry.answer[number]
        if after.problem:
            reward, why = -1.0, f"unreadable calls: {after.problem}"
        elif len(results) == len(before):
            reward, why = (1.0, "all done") if acted and not distance else (-1.0, "ended too early")
        elif later < distance:
            reward, why = 1.0, f"a needed call; the distance was {distance} and is {later}"
        elif later > distance or failed:
            reward, why = -1.0, "a wrong call"
        else:
            reward, why = (-1.0, "made before") if stalled else (0.0, "a harmless call")
        return Judgement({"reward": reward, "distance": float(distance)}, explanation=why)

    def _distance(self, entry: BfclTask, number: int, script: Script) -> tuple[int, list[str]]:
        """Return the distance in user turn ``number`` after a script's calls, and their results."""
        world, results = self.environment.board.replayed(entry, script.turns)
        path, had, ways = self._path(entry.id, number), Counter(results), list[int]()
        try:
            own = world.leaves()
        except RecursionError:
            return FAR, results
        for left, (leaves, needed) in zip(reversed(range(len(path))), path, strict=True):
            ways.append(left + ((own - leaves) + (leaves - own) + (needed - had)).total())
        return min(ways), results

    def _followed(self, name: str, number: int) -> list[tuple[Counter[str], Counter[str]]]:
        """Return the public values at the begin of a user turn of the reference and after each of
        its calls, each with the turn's results so far."""
        board = self.environment.board
        entry = board.entry(name)
        world, _ = board.replayed(entry, [[turn] for turn in entry.answer[:number]])
        results, path = list[str](), [(world.leaves(), Counter[str]())]
        for call in entry.answer[number]:
            results.append(world.run(call))
            path.append((world.leaves(), Counter(results)))
        return path


def _calls(script: Script) -> list[FunctionCall]:
    return [call for turn in script.turns for reply in turn for call in reply]
