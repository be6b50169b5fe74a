"""The Sudoku environment; puzzles are checked by an exact-cover solver that shares nothing with the
environment's."""

import asyncio
import random
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments import registry, sudoku
from coppice.actors.environments.base import PROMPTS, SPLIT, Task, Transition
from coppice.actors.environments.sudoku import (
    State,
    Sudoku,
    full_grid,
    generate,
    labelled,
    solutions,
)
from coppice.wire.faults import DataFault

NOBODY: Any = None
SMALL = Sudoku(size=4, blanks=8)
SOLVED = "1234341221434321"
SEEDS = st.integers(0, 2**31)
BLANKS = {4: (1, 6, 10, 12), 9: (1, 20, 40)}
PUZZLES = st.sampled_from(
    [(size, blanks) for size, choices in BLANKS.items() for blanks in choices]
)


def exact_cover(board: str, limit: int) -> set[str]:
    """At most ``limit`` solutions by Knuth's Algorithm X on the four constraints of each placement."""
    size = round(len(board) ** 0.5)
    box = round(size**0.5)
    rows = {
        (cell, digit): [
            ("cell", cell),
            ("row", cell // size, digit),
            ("column", cell % size, digit),
            ("box", cell // size // box, cell % size // box, digit),
        ]
        for cell in range(size * size)
        for digit in range(1, size + 1)
    }
    columns: dict[Any, set[Any]] = {}
    for row, needs in rows.items():
        for need in needs:
            columns.setdefault(need, set()).add(row)

    def select(row: Any) -> list[Any]:
        taken = []
        for need in rows[row]:
            for other in columns[need]:
                for away in rows[other]:
                    if away != need:
                        columns[away].remove(other)
            taken.append(columns.pop(need))
        return taken

    def restore(row: Any, taken: list[Any]) -> None:
        for need in reversed(rows[row]):
            columns[need] = taken.pop()
            for other in columns[need]:
                for away in rows[other]:
                    if away != need:
                        columns[away].add(other)

    chosen = [(cell, int(content)) for cell, content in enumerate(board) if content != "."]
    for row in chosen:
        if any(need not in columns for need in rows[row]):
            return set()  # two digits clash
        select(row)
    found: set[str] = set()

    def search() -> None:
        if not columns:
            found.add("".join(str(digit) for _, digit in sorted(chosen)))
            return
        need = min(columns, key=lambda column: len(columns[column]))
        for row in sorted(columns[need]):
            chosen.append(row)
            taken = select(row)
            search()
            restore(row, taken)
            chosen.pop()
            if len(found) >= limit:
                return

    search()
    return found


def removed_one_by_one(attempts: int, seed: int) -> str:
    """GEM's removal: a cell stays empty only while the solution is unique."""
    rng = random.Random(seed)
    grid = list(full_grid(4, rng))
    cells = list(range(16))
    rng.shuffle(cells)
    for cell in cells[:attempts]:
        kept, grid[cell] = grid[cell], "."
        if len(exact_cover("".join(grid), 2)) != 1:
            grid[cell] = kept
    return "".join(grid)


def play(game: Sudoku, state: State, move: tuple[int, ...]) -> Transition:
    text = f"<action>{game.notation(move)}</action>"
    return asyncio.run(game.step(state, game.read(state, text), NOBODY))


def right_move(state: State, cell: int) -> tuple[int, int, int]:
    return (*divmod(cell, state.size), int(state.solution[cell]))


def small(board: str, turn: int = 0) -> State:
    return State(4, board, SOLVED, board, turn)


# ----------------------------------------------------------------------------------------------
# puzzles


@given(PUZZLES, SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_puzzle_has_exactly_its_blanks_and_one_solution(kind: tuple[int, int], seed: int) -> None:
    size, blanks = kind
    state = Sudoku(size=size, blanks=blanks).initial(Task("t", seed=seed))
    assert (state.size, state.board, state.turn, state.past, state.over) == (
        size,
        state.puzzle,
        0,
        (),
        False,
    )
    assert len(state.puzzle) == size * size
    assert state.puzzle.count(".") == blanks
    assert exact_cover(state.puzzle, 2) == {state.solution}


@pytest.mark.parametrize(("size", "blanks"), [(9, 40), (4, 8)])
def test_a_seed_always_gives_the_same_puzzle_and_other_seeds_other_ones(
    size: int, blanks: int
) -> None:
    made = [generate(size, blanks, seed) for seed in range(30)]
    assert made == [generate(size, blanks, seed) for seed in range(30)]
    assert len(set(made)) == 30


def test_the_puzzle_of_a_seed_never_changes() -> None:
    puzzle, solution = generate(4, 8, 7)
    assert (puzzle, solution) == ("1.4....123.4.13.", "1243342123144132")


@given(st.sampled_from([8, 10, 12]), SEEDS)
@settings(max_examples=15, deadline=None)
def test_the_puzzle_is_the_one_that_removal_cell_by_cell_gives(blanks: int, seed: int) -> None:
    """methods.md 3.3 word for word: as many attempts as blanks, a removal kept only with one
    solution, a retry if one was refused."""
    tries = (removed_one_by_one(blanks, seed + attempt * 1_000_003) for attempt in range(256))
    assert generate(4, blanks, seed)[0] == next(grid for grid in tries if grid.count(".") == blanks)


def test_a_seed_without_a_puzzle_is_a_data_fault_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sudoku, "TRIES", 1)
    failed = []
    for seed in range(100, 140):
        try:
            generate(4, 12, seed)
        except DataFault as fault:
            failed.append(str(fault))
            assert all(part in failed[-1] for part in (f"seed {seed}", "size 4", "12 blanks"))
    assert failed


def test_the_solver_knows_all_grids_of_size_4_and_stops_at_the_limit() -> None:
    assert len(set(solutions("." * 16, 1000))) == 288
    assert len(solutions("." * 16, 5)) == 5
    assert solutions(SOLVED, 2) == [SOLVED]
    assert (
        solutions("11" + "." * 14, 2)
        == solutions("1...1" + "." * 11, 2)
        == solutions("1....1" + "." * 10, 2)
        == []
    )


def test_the_solver_finds_the_one_solution_of_17_clues() -> None:
    clues = "000000010400000000020000000000050407008000300001090000300400200050100000000806000"
    answer = "693784512487512936125963874932651487568247391741398625319475268856129743274836159"
    assert solutions(clues.replace("0", "."), 2) == [answer]


@given(st.randoms(use_true_random=False), st.integers(0, 16))
@settings(max_examples=60, deadline=None)
def test_the_solver_finds_what_exact_cover_finds(rng: random.Random, clues: int) -> None:
    cells = set(rng.sample(range(16), clues))
    digits = [d if rng.random() < 0.9 else rng.choice("1234") for d in full_grid(4, rng)]
    board = "".join(digits[cell] if cell in cells else "." for cell in range(16))
    found = solutions(board, 400)
    assert len(found) == len(set(found))
    assert set(found) == exact_cover(board, 400)


# ----------------------------------------------------------------------------------------------
# play


@given(SEEDS, st.booleans(), st.integers(1, 60), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_random_legal_play_keeps_the_rules(
    seed: int, terminate: bool, cap: int, rng: random.Random
) -> None:
    game = Sudoku(size=4, blanks=10, terminate_on_wrong=terminate, max_turns=cap)
    state = game.initial(game.task(seed))
    transition = Transition(state, "", False)
    while not transition.done:
        cube = [(r, c, d) for r in range(-1, 6) for c in range(-1, 6) for d in range(-1, 6)]
        assert [move for move in cube if game.legal(state, move)] == game.moves(state)
        row, column, digit = move = rng.choice(game.moves(state))
        before, transition = state, play(game, state, move)
        state = transition.state
        right = before.solution[row * 4 + column] == str(digit)
        changed = [cell for cell in range(16) if before.board[cell] != state.board[cell]]
        assert changed == ([row * 4 + column] if right else [])
        assert all(
            digit in (".", answer)
            for digit, answer in zip(state.board, state.solution, strict=True)
        )
        assert (state.puzzle, state.solution, state.turn) == (
            before.puzzle,
            before.solution,
            before.turn + 1,
        )
        assert transition.observation == ""
        solved, wrong, late = "." not in state.board, terminate and not right, state.turn == cap
        assert transition.done == (solved or wrong or late)
        assert transition.outcome == (1 if solved else -1 if wrong else 0 if late else None)
    assert transition.measures == {
        "success": float("." not in state.board),
        "completion": pytest.approx(1 - state.board.count(".") / 10),
    }
    assert game.moves(state) == []


@given(SEEDS, st.randoms(use_true_random=False))
@settings(max_examples=3, deadline=None)
def test_the_solution_in_any_order_solves_a_full_puzzle(seed: int, rng: random.Random) -> None:
    game = Sudoku(max_turns=40)
    state = game.initial(game.task(seed))
    cells = [cell for cell in range(81) if state.puzzle[cell] == "."]
    rng.shuffle(cells)
    transitions = [Transition(state, "", False)]
    for cell in cells:
        state = transitions[-1].state
        transitions.append(play(game, state, right_move(state, cell)))
    assert [transition.outcome for transition in transitions[1:]] == [None] * 39 + [1.0]
    assert transitions[-1].state.board == state.solution
    assert transitions[-1].measures == {"success": 1.0, "completion": 1.0}


def test_a_wrong_digit_is_refused_and_the_episode_goes_on() -> None:
    state = small("12.4" + SOLVED[4:15] + ".")
    transition = play(SMALL, state, (0, 2, 1))
    assert transition == Transition(msgspec.structs.replace(state, turn=1), "", False)
    assert play(SMALL, transition.state, (0, 2, 3)).state.board == "1234" + SOLVED[4:15] + "."


def test_a_wrong_digit_can_end_the_episode_as_a_loss() -> None:
    game = Sudoku(size=4, blanks=2, terminate_on_wrong=True, max_turns=2)
    state = small("12.4" + SOLVED[4:15] + ".")
    first = play(game, state, (0, 2, 3))
    assert not first.done
    second = play(game, first.state, (3, 3, 4))
    assert (second.done, second.outcome) == (True, -1.0)
    assert second.measures == {"success": 0.0, "completion": 0.5}
    assert game.moves(second.state) == []


@pytest.mark.parametrize(
    ("board", "digit", "outcome"),
    [("..34", 1, 0.0), ("..34", 2, 0.0), (".234", 2, 0.0), (".234", 1, 1.0)],
)
def test_the_last_turn_counts_as_lost_time_unless_it_solves(
    board: str, digit: int, outcome: float
) -> None:
    game = Sudoku(size=4, max_turns=7, blanks=4)
    transition = play(game, small(board + SOLVED[4:], turn=6), (0, 0, digit))
    assert (transition.done, transition.outcome) == (True, outcome)
    assert transition.measures["success"] == outcome
    assert not play(game, small(board + SOLVED[4:], turn=5), (0, 0, 2)).done


@pytest.mark.parametrize(
    "text", ["1 1 3", "1 5 3", "0 2 2", "1 2 5", "1 2 0", "5 2 2", "1 2", "1 2 3 4", "1 2 x", ""]
)
def test_an_unusable_action_loses_and_keeps_what_was_filled(text: str) -> None:
    state = msgspec.structs.replace(small("1..4.4.2" + SOLVED[8:]), board="1.34.4.2" + SOLVED[8:])
    action = SMALL.read(state, f"<action>{text}</action>")
    transition = asyncio.run(SMALL.step(state, action, NOBODY))
    assert not action.valid
    assert (transition.done, transition.outcome) == (True, -1.0)
    assert transition.measures == {"success": 0.0, "completion": 0.25}


# ----------------------------------------------------------------------------------------------
# texts


@pytest.mark.parametrize("text", ["3 7 5", " 3  7   5 ", "3,7,5", "3, 7, 5", "\n3 7\t5\n"])
def test_a_move_is_row_column_digit_counted_from_1(text: str) -> None:
    assert Sudoku().move(text) == (2, 6, 5)


@pytest.mark.parametrize(
    "text",
    ["375", "3 7", "3 7 5 1", "R3 C7 5", "3 7 five", "-3 7 5", "3 7 5.", "٣ 7 5", "9" * 5000],
)
def test_other_text_is_no_move(text: str) -> None:
    assert Sudoku().move(text) is None


def test_every_move_is_read_from_its_own_notation() -> None:
    moves = Sudoku().moves(State(9, "." * 81, "1" * 81, "." * 81))
    assert len(set(moves)) == 729
    assert [Sudoku().move(Sudoku().notation(move)) for move in moves] == moves


def test_the_last_action_block_counts_and_a_filled_cell_is_illegal() -> None:
    state = small(".234" + SOLVED[4:])
    assert SMALL.read(state, "<action>1 2 2</action> or <action>1 1 1</action>").kind == "move"
    assert SMALL.read(state, "<action>1 1 1</action> or <action>1 2 2</action>").kind == "illegal"
    assert SMALL.read(state, "1 1 1").kind == "invalid"
    assert Sudoku(size=4, blanks=8, boxed=True).read(state, r"\boxed{1 1 1}").move == (0, 0, 1)


def test_a_small_grid_is_drawn_with_labels_and_boxes() -> None:
    assert labelled("12.4...." + "." * 7 + "1") == (
        "   C1 C2 | C3 C4\nR1  1  2 |  .  4\nR2  .  . |  .  .\n   ------+------\nR3  .  . |  .  .\nR4  .  . |  .  1"
    )


@given(
    st.sampled_from([4, 9]).flatmap(
        lambda n: st.text("." + "123456789"[:n], min_size=n * n, max_size=n * n)
    )
)
@settings(max_examples=50)
def test_the_drawn_grid_can_be_read_back(board: str) -> None:
    size = round(len(board) ** 0.5)
    head, *lines = labelled(board).splitlines()
    assert re.findall(r"C\d", head) == [f"C{column + 1}" for column in range(size)]
    rows = dict(line.split(" ", 1) for line in lines if line.startswith("R"))
    assert "".join(re.sub(r"[ |]", "", rows[f"R{row + 1}"]) for row in range(size)) == board
    assert {len(line) for line in lines} == {len(head)}


def test_the_prompt_shows_the_board_and_never_the_solution() -> None:
    game = Sudoku()
    state = game.initial(game.task(5))
    (message,) = game.prompt(game.task(5), state)
    shared, shown = message["content"].split(SPLIT)
    assert labelled(state.board) in shown
    assert "9x9 with 3x3 boxes, and 40 cells" in shown
    other = msgspec.structs.replace(state, solution="1" * 81)
    assert game.prompt(game.task(5), other) == [message]
    (later,) = game.prompt(game.task(6), game.initial(game.task(6)))
    assert later["content"].split(SPLIT)[0] == shared
    assert not re.search(r"\{\w+\}", message["content"])


def test_the_compact_prompt_is_the_cells_alone() -> None:
    game = Sudoku("sudoku_compact", size=4, blanks=8)
    state = small("12.4" * 4)
    assert game.prompt(game.task(0), state) == [
        {"role": "user", "content": f"S{SPLIT}{'12.4' * 4}"}
    ]


def test_the_view_counts_and_names_the_blanks() -> None:
    view = SMALL.view(small(".2.4" + SOLVED[4:15] + "."))
    assert (view["blanks"], view["empty"], view["size"], view["box"]) == (
        "3",
        "1 1, 1 3, 4 4",
        "4",
        "2",
    )


def test_the_history_keeps_the_last_moves_with_their_result() -> None:
    game = Sudoku(size=4, blanks=8, history=2)
    state = small("...." + SOLVED[4:])
    for move in ((0, 0, 1), (0, 1, 3), (0, 1, 2)):
        state = play(game, state, move).state
    assert state.past == ("1 2 3 wrong", "1 2 2 right")
    assert "1 2 3 wrong\n1 2 2 right" in game.prompt(game.task(0), state)[0]["content"]


def test_a_state_travels_and_is_a_dictionary_key() -> None:
    game = Sudoku(size=4, blanks=8, history=3)
    state = game.initial(game.task(3))
    after = play(game, state, game.moves(state)[0]).state
    for one in (state, after):
        plain = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(one)))
        assert msgspec.convert(plain, State) == one
        assert hash(msgspec.convert(plain, State)) == hash(one)
    assert {state: 1, after: 2}[game.initial(game.task(3))] == 1


def test_a_judged_turn_has_the_games_own_budget() -> None:
    state = small(".234" + SOLVED[4:], turn=2)
    turn = SMALL.judged(SMALL.task(1), state, SMALL.read(state, "<action>1 1 1</action>"), 3, 4)
    assert (turn.step, turn.budget, turn.move) == (3, 100, [0, 0, 1])
    assert msgspec.convert(turn.state, State) == state


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 5}, "size = 5: expected 9 or 4"),
        ({"size": 4}, "blanks = 40: expected 1 to 12 for size 4"),
        ({"blanks": 0}, "blanks = 0: expected 1 to 64 for size 9"),
        ({"max_turns": 0}, "max_turns = 0: expected a whole number, at least 1"),
    ],
)
def test_an_impossible_option_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        registry.load("sudoku", options)


def test_the_prompt_files_name_only_placeholders_that_are_filled() -> None:
    known = {*SMALL.view(small(SOLVED)), "past"}
    for path in PROMPTS.glob("sudoku*.txt"):
        assert set(re.findall(r"\{(\w+)\}", path.read_text())) <= known, path
