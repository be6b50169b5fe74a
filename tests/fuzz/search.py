"""Search for an input that breaks a parser: guided by coverage where atheris is installed, by
mutation of the corpus anywhere.

``python -m tests.fuzz.search TARGET --seconds 60`` (all targets without a name) prints executions
and findings, and keeps each finding under ``tests/fuzz/corpus/TARGET``. ``--guided`` uses atheris,
which instruments the code and adds to the corpus what reaches new branches.
"""

import argparse
import hashlib
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
LONGEST = 4096
_TOKENS = [
    *b"\x00 \xff \x7f \x80 \xff\xff\xff\xff \x00\x00\x00\x80 \xc3\x28 \xed\xa0\x80".split(b" "),
    *b'\n " \\ < > </ { } [ ] - NaN 1e999 -0 null = \xdf\xff\xff\xff\xff'.split(b" "),
    *"\u0663 \u00b2 \u2028 \U0001d7ce \u0130".encode().split(b" "),
    *(b"[" * 600, b'{"a":' * 300, b"9" * 400, b"\x91" * 600),
]
"""Bytes at which parsers have stumbled: borders of integers, broken UTF-8, nesting, digits that are
none, prefixes of huge containers."""


def mutated(rng: random.Random, inputs: list[bytes]) -> bytes:
    """Return one input with one to six changes."""
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.randint(1, 6)):
        at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
        match rng.randrange(6):
            case 0:
                data[at:at] = rng.choice(_TOKENS)
            case 1 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end]
            case 4:
                other = rng.choice(inputs)
                data[at:end] = other[: rng.randint(0, len(other))]
            case _:
                data[at:end] = rng.randbytes(rng.randint(0, 8))
    return bytes(data[:LONGEST])


def search(
    target: Callable[[bytes], None], inputs: list[bytes], seed: int, most: int, seconds: float = 1e9
) -> tuple[int, dict[str, bytes]]:
    """Run every input and then mutations of them. Returns the executions and one input for each
    place that failed."""
    rng, findings, count, end = random.Random(seed), {}, 0, time.monotonic() + seconds
    while count < most and time.monotonic() < end:
        data = inputs[count] if count < len(inputs) else mutated(rng, inputs)
        count += 1
        try:
            target(data)
        except Exception as error:  # noqa: BLE001
            where = traceback.extract_tb(error.__traceback__)[-1]
            findings.setdefault(
                f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}", data
            )
    return count, findings


def corpus(target: str) -> list[bytes]:
    """Return what earlier searches kept."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*")) if path.is_file()]


def guided(target: str, seconds: float) -> None:
    """Hand over to atheris, which ends this process."""
    import atheris  # pyright: ignore  # an extra: pip install -e ".[fuzz]"

    rooms = "actors judges coppice.learner.main coppice.scheduler.growth.tree wire common"
    rooms += " coppice.tools.launching.config msgspec tomllib json"
    with atheris.instrument_imports(include=rooms.split()):  # pyright: ignore
        from tests.fuzz.targets import TARGETS, seeds
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for data in seeds(target):
        (folder / f"{hashlib.sha256(data).hexdigest()[:16]}.bin").write_bytes(data)
    limits = [f"-max_total_time={seconds:.0f}", f"-max_len={LONGEST}"]
    arguments = [sys.argv[0], str(folder), *limits, f"-artifact_prefix={folder}/crash-"]
    atheris.Setup(arguments, TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--guided", action="store_true", help="by coverage; needs atheris and a target"
    )
    asked = parser.parse_args()
    if asked.guided:
        guided(asked.target, asked.seconds)
    from tests.fuzz.targets import TARGETS, seeds

    failures = 0
    for name in [asked.target] if asked.target else TARGETS:
        count, findings = search(TARGETS[name], seeds(name), asked.seed, 10**12, asked.seconds)
        print(f"{name}: {count} executions, {len(findings)} findings", flush=True)
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        for place, data in findings.items():
            print(f"  {place}\n    {data[:120]!r}")
            (CORPUS / name / f"crash-{hashlib.sha256(data).hexdigest()[:16]}.bin").write_bytes(data)
        failures += len(findings)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
