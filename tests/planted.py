"""Faults of learner, engine and journal that the tests must find: ``python -m tests.planted [WORDS]``
plants each, by an edit of one place in a copy of the project, and runs the test that must fail.

Those of the scheduler are in tests/simulation/planted.py (``python -m tests.simulation --planted
600``).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent
_LEFT_OUT = (".git", ".venv*", ".cache", "runs", "docs", "__pycache__", "*.egg-info")


class Planted(msgspec.Struct, frozen=True):
    """right, wrong: the text of ``file``, which is there once, and what takes its place. test: the
    test that must fail."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


FAULTS = tuple(
    Planted(name, file, right, wrong, f"tests/{test}")
    for name, file, right, wrong, test in (
        ("the clipped surrogate takes the larger term", "learner/update/corrections.py",
         "plain.minimum(ratio.clamp(", "plain.maximum(ratio.clamp(",
         "learner/test_corrections.py::"
         "test_terms_coefficients_and_gradients_are_those_of_the_formula_one_token_at_a_time"),
        ("GRPO's deviation has the other divisor", "learner/schemes/grpo.py",
         "standardise(group, std, ddof)", "standardise(group, std, 1 - ddof)",
         "learner/test_schemes.py::test_known_answers"),
        ("gradients of an update stay for the next one", "learner/model/optimizer.py",
         "self.adamw.zero_grad(set_to_none=True)", "pass",
         "learner/test_updates.py::test_four_updates_equal_two_a_checkpoint_a_resume_and_two"),
        ("the warm-up begins with a rate of zero", "learner/model/optimizer.py",
         "c.lr * (version + 1) / c.warmup_updates", "c.lr * version / c.warmup_updates",
         "learner/test_updates.py::test_each_schedule_has_its_rates"),
        ("siblings see each other in packed attention", "learner/forest/attention.py",
         "bool((end[k:last] != last).any())", "False",
         "learner/test_attention.py::"
         "test_the_cascade_equals_the_dense_mask_in_values_and_gradients"),
        ("keys and values of an older version enter the cache", "actors/engines/batch.py",
         "must not enter the new version's cache\n        if active.version == version:",
         "must not enter the new version's cache\n        if True:",
         "actors/test_local_engine.py::"
         "test_a_swap_while_a_prompt_is_prefilled_keeps_its_mixed_keys_out_of_the_cache"),
        ("new weights leave the prefix cache as it is", "actors/engines/local.py",
         "with other weights\n        self.batch.forget()", "with other weights",
         "actors/test_engine_contract.py::"
         "test_a_new_version_is_sampled_from_and_reads_no_other_versions_cache"),
        ("a cached prefix is as long as the segment that it ends in", "actors/engines/radix.py",
         "pieces[-1] = pieces[-1][:, :, :, :shared]", "pass",
         "actors/test_radix.py::test_random_operations_equal_the_brute_force_cache_to_the_byte"),
        ("a resume keeps the marks of lost updates", "scheduler/ledger/journal.py",
         "UPDATE groups SET trained=NULL WHERE trained>?",
         "UPDATE groups SET trained=NULL WHERE trained>? AND 0",
         "scheduler/test_journal.py::"
         "test_untrained_trees_are_those_that_grow_or_have_a_group_no_version_holds"),
        ("the groups of a quarantined tree are forgotten", "scheduler/ledger/journal.py",
         "(status='growing' OR EXISTS", "status!='quarantined' AND (status='growing' OR EXISTS",
         "scheduler/test_journal.py::"
         "test_what_a_quarantined_tree_had_given_is_still_to_be_trained"),
    )
)  # fmt: skip


def finds(fault: Planted) -> bool:
    """Whether the fault's test fails with it. Raises ValueError if the fault cannot be planted, or
    if its test cannot run."""
    with tempfile.TemporaryDirectory(prefix="coppice-planted-") as scratch:
        copy = Path(scratch, "coppice")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        place = copy / fault.file
        text = place.read_text()
        if (count := text.count(fault.right)) != 1:
            raise ValueError(f"{fault.file} has {fault.right!r} {count} times: mend this table")
        place.write_text(text.replace(fault.right, fault.wrong))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", fault.test]
        env = os.environ | {"PYTHONPATH": f"{copy}/src:{copy}"}
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise ValueError(f"{fault.test} could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main(words: list[str]) -> int:
    """Plant the faults whose names have all ``words``. Return 1 if one is not found."""
    missed = 0
    for fault in FAULTS:
        if all(word in fault.name for word in words):
            found = finds(fault)
            missed += not found
            print(f"{'found' if found else 'MISSED':<6}  {fault.name}  ({fault.test})", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
