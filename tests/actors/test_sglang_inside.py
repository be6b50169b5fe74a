"""SGLang inside the actor's process, against transformers: one start of a real engine, driven by
``tests.sglang_cpu.inside``."""

import json
import multiprocessing
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.sglang_inside import Inside
from coppice.learner.model.weight_server import WeightServer
from coppice.tools.bootstrap import ROOT
from tests.actors.test_engine_contract import adapter_folder
from tests.actors.test_local_engine import (
    GREATEST_DIFFERENCE,
    full_logprobs,
    ids,
    reference,
    version_folder,
)
from tests.actors.test_sglang_weights import in_memory
from tests.sglang_cpu import environment, server
from tests.sglang_cpu.shared import LORA

pytestmark = pytest.mark.slow

PROMPT, OTHER = ids(1, 24), ids(4, 60)


class Drive:
    """What the engine answered, how its process ended, and the models that the versions hold."""

    def __init__(self, llama: Path, folder: Path):
        full, digest, model = version_folder(folder, llama, 3)
        adapter, adapter_digest, adapted = adapter_folder(folder, llama, 6)
        base, base_digest, _ = version_folder(folder, llama, 0, noise=0.0)
        _, _, remembered = version_folder(folder, llama, 5)
        self.models: dict[str, Any] = {"full": model, "adapter": adapted, "memory": remembered}
        giver = WeightServer(timeout_s=60.0)
        tensors = {name: p.detach() for name, p in remembered.named_parameters()}
        memory = in_memory(folder, giver, 5, tensors, 20_000)
        plan = {
            "model": str(llama), "arguments": server.FLAGS | LORA,
            "prompt": PROMPT.tolist(), "other": OTHER.tolist(),
            "full": [3, str(full), digest], "wrong": [4, str(full), "0" * 64],
            "memory": [5, memory.path, memory.digest], "base": [0, str(base), base_digest], "adapter": [6, str(adapter), adapter_digest],
        }  # fmt: skip
        (folder / "plan.json").write_text(json.dumps(plan))
        answers = folder / "answers.json"
        script = Path(server.__file__).with_name("inside.py")
        variables = server.variables()
        variables["PYTHONPATH"] += f":{ROOT}/src:{ROOT}"
        printed = folder / "printed"  # a file: a pipe would end with the last of its descendants
        try:
            with printed.open("w") as out:
                self.status = subprocess.run(
                    [environment.python(), script, folder / "plan.json", answers],
                    env=variables, cwd=folder, stdout=out, stderr=out, timeout=400,
                ).returncode  # fmt: skip
            ended = time.time()
        finally:
            giver.close()
        self.printed = printed.read_text()[-4000:]
        assert answers.exists(), self.printed
        self.ended_after_s = ended - answers.stat().st_mtime
        self.answers: dict[str, Any] = json.loads(answers.read_text())


@pytest.fixture(scope="module")
def drive(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """One run of the script."""
    return Drive(llama, tmp_path_factory.mktemp("inside"))


def test_tokens_and_logprobs_are_those_of_a_full_forward(drive: Drive, llama: Path) -> None:
    (sample,) = drive.answers["greedy"]["samples"]
    model = reference(llama)
    expected = model.generate(
        torch.tensor(PROMPT, dtype=torch.long)[None], max_new_tokens=8, do_sample=False
    )[0, len(PROMPT) :].tolist()
    assert sample["tokens"] == expected
    for result, prompt in ((drive.answers["greedy"], PROMPT), (drive.answers["four"], OTHER)):
        _judge(result, prompt, model, 0, GREATEST_DIFFERENCE)
    assert len({tuple(sample["tokens"]) for sample in drive.answers["four"]["samples"]}) > 1
    assert (drive.answers["four"]["cached"], drive.answers["again"]["cached"]) == (
        0,
        len(OTHER) - 1,
    )


@pytest.mark.parametrize(("how", "version"), [("full", 3), ("memory", 5), ("adapter", 6)])
def test_a_new_version_is_sampled_from_by_each_transport(
    drive: Drive, how: str, version: int
) -> None:
    """From a file, out of the learner's memory, and an adapter alone."""
    assert drive.answers[how]["cached"] == 0
    _judge(drive.answers[how], PROMPT, drive.models[how], version, 5 * GREATEST_DIFFERENCE)
    assert len(set(drive.answers["proofs"])) == 4
    assert drive.answers["stats"]["version"] == 6


def test_an_update_within_a_generation_labels_each_token(drive: Drive) -> None:
    for sample in drive.answers["across"]["samples"]:
        assert len(sample["versions"]) == 400
        assert set(sample["versions"]) == {0, 3}, (
            "the version came before the first token, or after the last"
        )
        assert sample["versions"] == sorted(sample["versions"])


def test_what_cannot_be_is_refused_and_the_engine_goes_on(drive: Drive) -> None:
    assert "digest" in drive.answers["refused"]
    assert "temperature" in drive.answers["data_fault"]
    assert (drive.answers["cancelled"], drive.answers["room"]) == (True, 8)


def test_a_killed_child_ends_the_actor(drive: Drive) -> None:
    """By SGLang itself, with no minute of crash dumps before; the launcher starts another."""
    assert drive.status == -9, drive.printed
    assert drive.ended_after_s < 30, drive.printed


async def test_a_child_that_ends_by_itself_is_noticed(llama: Path) -> None:
    """SGLang takes status 0 for no failure."""
    way = Inside(str(llama), ActorsConfig())
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    way._children = [child]
    assert "ended with status 0" in await way.died()


def _judge(
    result: dict[str, Any], prompt: np.ndarray, model: Any, version: int, most: float
) -> None:
    """The samples are labelled with ``version`` and their log-probabilities are those of ``model``."""
    for sample in result["samples"]:
        assert sample["versions"] == [version] * len(sample["tokens"])
        expected = full_logprobs(model, prompt, np.array(sample["tokens"], np.int32))
        assert np.abs(expected - sample["logprobs"]).max() < most
