"""The terminal hears of it when many episodes crash: once, with an example and the remedy."""

from pathlib import Path

from coppice.scheduler.growth.crashes import FEWEST, WINDOW, Crashes


def test_many_crashes_are_told_once_with_a_reason_and_the_remedy() -> None:
    said: list[str] = []
    crashes = Crashes(Path("runs/a b"), said.append)
    for _ in range(FEWEST - 1):
        crashes.note("exit status 1: ValueError: no\n\nIts last output:\n...")
    assert said == []
    for _ in range(WINDOW):
        crashes.note("exit status 1: ValueError: no\n\nIts last output:\n...")
    (line,) = said
    assert line.startswith(f"warning: {FEWEST} of the last {FEWEST} episodes crashed")
    assert "exit status 1: ValueError: no. Mend" in line and "last output:" not in line
    assert "coppice trees 'runs/a b' --where 'crashed_max = 1'" in line


def test_a_few_crashes_among_many_episodes_are_no_warning_and_earlier_ones_are_forgotten() -> None:
    said: list[str] = []
    crashes = Crashes(say=said.append)
    for i in range(10 * WINDOW):
        crashes.note("" if i % 8 else "killed by SIGKILL: ")
    assert said == []
    for _ in range(WINDOW // 4):
        crashes.note("it ran longer than 600 s: ")
    assert len(said) == 1, "a run that begins to crash is told, however long it went well"
