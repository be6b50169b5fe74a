"""The benchmarks of games at their smallest: what they count adds up, and each side does the work it claims to do."""

from fractions import Fraction

import pytest

from actors.environments.minesweeper import HIDDEN, State, lay, revealed
from tools.research.benches import mc_prefill, oracles, posterior, slow_oracle


def test_prompts_are_computed_once_and_repeated_ones_not_at_all() -> None:
    row = mc_prefill.run(whole_games=1, games=2, continuations=6)
    for found in (row["whole"], row["compact"]):
        assert found["evicted_tokens"] == 0
        assert found["requests"] > found["repeated_prompts"] > 0
        assert found["ratio"] == found["prefilled_tokens"] / found["ideal_prefill_tokens"] >= 1
        assert 0 <= found["excess_tokens"] < 0.1 * found["repeated_prompts"]
        assert found["unshared_over_prefilled"] > found["asked_over_prefilled"] > 1


def test_without_sharing_every_prompt_token_is_prefilled() -> None:
    row = mc_prefill.run(whole_games=1, games=1, continuations=4)
    apart = row["compact_unshared"]
    assert apart["prefilled_tokens"] == apart["prompt_tokens"] > apart["ideal_prefill_tokens"]
    assert apart["unshared_over_prefilled"] == apart["asked_over_prefilled"] == 1
    # Each continuation, and each of the chain's turns, is a request of its own.
    assert 3 <= apart["requests"] - apart["continuation_steps"] <= 5
    assert row["unshared_time_ratio"] > 0


def test_only_a_turn_that_awaits_its_judgement_makes_the_engine_wait() -> None:
    row = slow_oracle.run(games=8, rounds=1, median_s=0.3)
    assert row["late_turns"] == row["awaited_turns"] == row["at_once_turns"] >= 8 * 3
    for name in ("at_once", "late", "awaited"):
        assert 0 < row[f"{name}_busy"] <= 1
        assert 0 < row[f"{name}_play_s"] <= row[f"{name}_wall_s"]
    # The engine is through before the longest judgement is there, unless each turn waits for the one before.
    assert row["late_wall_s"] >= row["late_longest_delay_s"] > row["late_play_s"]
    assert row["awaited_busy"] < row["late_busy"]
    assert row["awaited_play_s"] > 3 * 0.3


def test_the_oracles_are_measured_on_games_that_are_on() -> None:
    row = oracles.run(positions=4, rounds=1, labels=20)
    assert 0 < row["ratio"] == pytest.approx(row["mcts_calls_per_cpu_s"] / row["bare_calls_per_cpu_s"])
    # A search of 1,000 simulations costs more than looking a value up.
    assert row["minimax_calls_per_cpu_s"] > row["mcts_calls_per_cpu_s"]
    assert row["minesweeper_calls_per_cpu_s"] > row["mcts_calls_per_cpu_s"]
    assert row["sudoku_calls_per_cpu_s"] > row["mcts_calls_per_cpu_s"]


def test_the_posterior_agrees_with_the_enumeration_it_is_measured_against() -> None:
    row = posterior.run(share=0.02)
    for found in row["enumeration"].values():
        assert found["disagreements"] == 0
        assert found["positions"] >= 2
    assert row["ratio"] == row["enumeration"]["6x6/5"]["ratio"] > 0
    for found in row["boards"].values():
        assert 0 < found["mean_ms"] <= found["max_ms"]
        assert 0 <= found["inexact"] <= 1


def test_the_enumeration_knows_a_board_solved_by_hand() -> None:
    """One row of five with two mines and a 1 at its end: the mine beside it is certain, the other anywhere in the rest."""
    mined, layouts = posterior.enumerated(1, 5, 2, {0: 1})
    assert layouts == 3
    assert {cell: Fraction(count, layouts) for cell, count in mined.items()} == {
        1: 1,
        2: Fraction(1, 3),
        3: Fraction(1, 3),
        4: Fraction(1, 3),
    }


def test_played_positions_are_games_under_way() -> None:
    for state, found, seconds in posterior.played_positions((4, 4, 3), 10):
        assert set(found.mined) == {cell for cell, mark in enumerate(state.board) if mark == HIDDEN}
        assert sum(found.mined.values()) == 3 * found.layouts
        assert seconds >= 0


def test_numbers_of_a_board_are_what_its_layout_says() -> None:
    hidden = HIDDEN * 25
    state = revealed(State(5, 5, 5, 0, hidden, lay(5, 5, 5, 12, seed=3)), 12)
    numbers = posterior.numbers_of(state)
    assert numbers[12] == 0
    assert all(state.board[cell] == (str(number) if number else ".") for cell, number in numbers.items())
