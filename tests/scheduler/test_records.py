"""The records of several schedulers become those of the run, whatever order they come in and
whatever a crash took."""

import json
from pathlib import Path

from coppice.common import shards
from coppice.scheduler.ledger.records import JOINED, LARGEST, SUM, Joined, Reader, joined, parsed
from coppice.scheduler.telemetry.exporter import declaration, declared

BOTH = {"version": 1.0, "learner/groups": 8.0}
FIRST = BOTH | {"busy/engine": 0.9, "busy/engines": 3.0, "count/calls": 10.0, "time/run": 7.0}
SECOND = BOTH | {"busy/engine": 0.5, "busy/engines": 1.0, "count/calls": 5.0, "time/run": 3.0}


def test_counts_are_summed_means_weighted_and_the_rest_is_the_first_ones() -> None:
    first = FIRST | {"time/spread": 0.1, "rollout/outcome": 1.0, "rollout/outcomes": 1.0}
    first["count/retries"] = 2.0
    second = SECOND | {"time/spread": 0.4, "rollout/outcome": 0.0, "rollout/outcomes": 3.0}
    assert joined([first, second]) == {
        "version": 1.0,
        "learner/groups": 8.0,  # the learner has told both of the whole update
        "busy/engine": 0.8,
        "busy/engines": 4.0,
        "count/calls": 15.0,
        "count/retries": 2.0,
        "time/run": 7.0,
        "time/spread": 0.4,
        "rollout/outcome": 0.25,
        "rollout/outcomes": 4.0,
    }
    assert joined([FIRST]) == FIRST


def test_every_rule_is_of_declared_metrics() -> None:
    assert [name for name in JOINED if declaration(name) is None] == ["count/*"]
    weights = {rule for rule in JOINED.values() if rule not in (SUM, LARGEST)}
    assert weights
    assert all(weight in declared() for weight in weights)


def test_a_record_is_whole_with_its_last_part_and_takes_with_it_what_a_crash_left() -> None:
    run = Joined(2)
    assert run.add(0, FIRST) == []
    assert run.add(1, SECOND) == [joined([FIRST, SECOND])]
    # the second one dies before it has recorded this
    assert run.add(0, FIRST | {"version": 2.0}) == []
    assert run.add(1, SECOND | {"version": 3.0}) == []
    made = run.add(0, FIRST | {"version": 3.0})
    calls = [(record["version"], record["count/calls"]) for record in made]
    assert calls == [(2.0, 10.0), (3.0, 15.0)]
    assert Joined(1).add(0, FIRST) == [FIRST]


def test_a_damaged_line_and_one_without_a_version_are_no_records() -> None:
    lines = b'{"version": 1}\n{"ver\xff": 2}\n{"version": 2, "a": null}\n{"a": 1}\n{"version": nu'
    assert [record for _, record in parsed(lines)] == [{"version": 1}, {"version": 2, "a": None}]


def write(home: Path, *records: dict[str, float]) -> None:
    home.mkdir(parents=True, exist_ok=True)
    with (home / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def test_a_reader_joins_what_is_new_and_reads_anew_what_is_written_anew(tmp_path: Path) -> None:
    second = shards.folder(tmp_path, 1)
    reader = Reader(tmp_path, lambda name: name in ("version", "count/calls"))
    write(tmp_path, FIRST, {"version": 1.0, "heldout/em": 0.5})
    assert reader.read() == [{"version": 1.0, "count/calls": 10.0}]
    write(second)
    # the second scheduler has begun, and its part of the update is missing
    assert reader.read() == []
    write(second, SECOND)
    write(tmp_path, FIRST | {"version": 2.0})
    assert reader.read() == [{"version": 1.0, "count/calls": 15.0}]
    write(second, SECOND | {"version": 2.0})
    with (second / "metrics.jsonl").open("a") as file:
        file.write('{"version": 3.0, "learner/gro')
    assert [record["count/calls"] for record in reader.read()] == [15.0, 15.0]
    (tmp_path / "metrics.jsonl").unlink()  # the run is resumed from version 1
    write(tmp_path, FIRST | {"count/calls": 20.0})
    assert reader.read() == [{"version": 1.0, "count/calls": 25.0}]
