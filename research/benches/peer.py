"""Side by side with TRL's GRPOTrainer, which a user would pick instead: trained tokens a second,
seconds an update, peak memory.

Both train the same model on the same questions, group sizes, sampled lengths and rewards, with LoRA
of the same rank, in the same number type, on two threads in all. In the load "groups" each question
is a group of one turn; in "slate" a step samples candidates from one prefix, and the peer gets each
candidate as a sequence of its own. Rounds take turns. The first update is not counted, nor is the
last of ours, beside which nothing is sampled. Every text consists of digits, each one token of the
default tokenizer, so every length is known.

``python -m coppice.research.benches.peer WORK.json`` is the process of TRL's side, in the
environment that has trl, which is imported only there. Its settings should make TRL fast on a CPU:
no gradient checkpointing, reference model, dropout, logging, evaluation or checkpoints, one batch
of ``generate`` for all prompts of one length, and one group of sequences per forward pass."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from transformers import AutoTokenizer

from coppice.common.numbers import Count
from coppice.research import venvs as environments
from coppice.research.any_text import AnyText, EpisodeShape, TextState, reward
from coppice.research.benches import launch_command, memory, result
from coppice.scheduler.growth.tasks import GeneratedTasks
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.models import DEFAULT, ensure_model
from coppice.tools.defaults.settings import cache_folder, importable

PEER_UPDATES, OUR_UPDATES = 2, 4
"""Of a round. One of the peer's counts, and two of ours, which are shorter."""
THREADS, RANK, ALPHA, LR = 2, 16, 32, 1e-3
GOALS = {"groups": 2.5, "slate": 4.0}
"""Of the ratio of trained tokens a second; the ratio of memory should be below 1."""
DIGITS = "0123456789"
END = "<|no end|>"


# --------------------------------------------------------------------------- the load of both sides


class PeerLoad(msgspec.Struct, frozen=True):
    """One shape of work: questions per update, samples per step, tokens per action, and rows
    (sequences) per forward pass of the peer."""

    shape: EpisodeShape
    questions: int
    samples: int
    action: int
    rows: int

    @property
    def sequences(self) -> int:
        """Sequences per update."""
        return self.questions * self.shape.steps * self.samples

    @property
    def tokens(self) -> int:
        """Trained tokens per update."""
        return self.sequences * self.action


LOADS = {
    "groups": PeerLoad(
        EpisodeShape(steps=1, shared=27, question=12, observation=0), questions=8, samples=8,
        action=40, rows=8,
    ),
    "slate": PeerLoad(
        EpisodeShape(steps=3, shared=120, question=30, observation=60), questions=4, samples=5,
        action=40, rows=5,
    ),
}  # fmt: skip
"""Plain groups whose prompts are as long as in configs/slate-cpu.toml, and trees with the lengths
of the other SLATE benchmarks."""


def prompts(load: PeerLoad, model: Path, seed: int, updates: int) -> list[str]:
    """Return the peer's prompts in order: by update, then by step, the whole prefix of each group
    of candidates once (TRL repeats it).

    The questions are those that a run of ``seed`` draws. Digits replace the trunk's actions, which
    a run would sample: they have the same number of tokens and are known beforehand.
    """
    text, environment = Text(str(model)), AnyText(load.shape, DIGITS)
    tasks, all_texts = GeneratedTasks(environment.task, seed), []
    for update in range(updates):
        drawn = [tasks.at(update * load.questions + place) for place in range(load.questions)]
        texts = [text.prompt(environment.prompt(task, TextState(task.seed))) for task in drawn]
        for step in range(1, load.shape.steps + 1):
            all_texts += texts
            after = [TextState(task.seed, step) for task in drawn]
            added = [
                environment.words(f"action {one}", load.action) + environment.observation(one)
                for one in after
            ]
            texts = [before + more for before, more in zip(texts, added, strict=True)]
    return all_texts


def endless(model: Path, folder: Path) -> Path:
    """Make a copy of the model, with links to its weights, whose end-of-text token has no row in
    the model, so that it is never sampled and all samples of both sides have their full length."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"eos_token": END})
    end = tokenizer.convert_tokens_to_ids(END)
    tokenizer.save_pretrained(folder)
    for weights in model.glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights.resolve())
    (folder / "config.json").symlink_to((model / "config.json").resolve())
    name = "generation_config.json"
    settings = json.loads((model / name).read_text()) | {"eos_token_id": end}
    (folder / name).write_text(json.dumps(settings))
    return folder


# --------------------------------------------------------------------------------------- the rounds


class Update(msgspec.Struct, frozen=True):
    """The end of an update: seconds on its side's own clock, and the tokens that it trained."""

    seconds: float
    tokens: float


class Round(msgspec.Struct, frozen=True):
    """One round of one side: trained tokens a second, seconds of an update, and the peak memory of
    all its processes."""

    tokens_s: float
    update_s: float
    peak_gib: float


def rated(updates: Sequence[Update], peak_gib: float) -> Round:
    """The round in which ``updates`` count but for the first one, which only starts the clock."""
    spent = updates[-1].seconds - updates[0].seconds
    tokens = sum(update.tokens for update in updates[1:])
    return Round(tokens / spent, spent / (len(updates) - 1), peak_gib)


def peer(
    load: PeerLoad, model: Path, folder: Path, dtype: str, allocator: bool = False
) -> Round:  # fmt: skip
    """A round of TRL. allocator: see ``run``."""
    folder.mkdir()
    work = msgspec.to_builtins(load) | {
        "model": str(model), "prompts": prompts(load, model, 0, PEER_UPDATES),
        "sequences": load.sequences, "updates": PEER_UPDATES, "steps": load.shape.steps,
        "dtype": dtype,
    }  # fmt: skip
    (folder / "work.json").write_bytes(msgspec.json.encode(work))
    python = str(environments.python("trl", "peer", over_ours=True))
    variables = {
        "PYTHONPATH": str(importable()), "OMP_NUM_THREADS": str(THREADS),
        "MKL_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    } | ({} if allocator else {"GLIBC_TUNABLES": ""})  # fmt: skip
    command = [python, "-m", "coppice.research.benches.peer", str(folder / "work.json")]
    peaks = memory.watch(command, folder / "printed", variables)
    lines = (folder / "updates.jsonl").read_bytes().splitlines()
    updates = [msgspec.json.decode(line, type=Update) for line in lines]
    return rated(_checked(load, updates), peaks.total)


def ours(load: PeerLoad, model: Path, folder: Path, dtype: str) -> Round:
    """A round of coppice launch; checkpoints are left out, as the peer's are."""
    folder.mkdir()
    (folder / "peer.toml").write_text('name = "peer"\n')
    settings = _settings(load, model, dtype)
    command = launch_command(folder / "run", folder / "peer.toml", settings)
    peaks = memory.watch(command, folder / "printed")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    updates = [
        Update(r["time/run"], r["learner/trained_tokens"] * (1 - r["learner/zero_advantage_share"]))
        for r in map(json.loads, lines)
    ]
    return rated(_checked(load, updates)[:-1], peaks.total)


def _settings(load: PeerLoad, model: Path, dtype: str) -> dict[str, object]:
    """The config of a run: everything that the peer has too, no more."""
    shape = ", ".join(f"{key} = {value}" for key, value in msgspec.to_builtins(load.shape).items())
    steps = load.shape.steps
    longest = 100 + load.shape.shared + load.shape.question
    longest += steps * (load.action + load.shape.observation)
    return {
        "model.name": f'"{model}"', "data.environment": '"coppice.research.any_text:AnyText"',
        "data.options": f'{{shape = {{{shape}}}, alphabet = "{DIGITS}"}}', "warm_start.steps": 0,
        "judges.use": '{"coppice.research.any_text:Checksum" = {}}',
        "scheduler.judge": '"checksum"',
        "scheduler.strategy": '"full"' if steps == 1 else '"slate"',
        "scheduler.strategy_options": f"{{k = {load.samples}}}", "scheduler.budget": steps,
        "scheduler.max_action_tokens": load.action, "scheduler.updates": OUR_UPDATES,
        "scheduler.questions_per_update": load.questions, "scheduler.max_staleness": 1,
        "scheduler.evaluation.questions": 0, "actors.count": 1, "actors.dtype": f'"{dtype}"',
        "actors.threads": THREADS // 2, "actors.max_batch": 64, "actors.capacity": 128,
        "actors.max_context": longest, "actors.kv_cache_gib": 0.4, "learner.count": 1,
        "learner.dtype": f'"{dtype}"', "learner.threads": THREADS // 2,
        "learner.scheme": '"grpo"' if steps == 1 else '"slate"', "learner.aggregation": '"token"',
        "learner.kl_coef": 0.0, "learner.lr": LR,
        "learner.lora": f"{{rank = {RANK}, alpha = {ALPHA}}}", "learner.micro_tokens": 960,
        "learner.checkpoint_every": OUR_UPDATES,
    }  # fmt: skip


def _checked(load: PeerLoad, updates: list[Update]) -> list[Update]:
    """Raises RuntimeError where a side trained fewer tokens than the load has (a group of equal
    rewards teaches nothing)."""
    for update in updates:
        if not 0.9 * load.tokens <= update.tokens <= load.tokens:
            raise RuntimeError(
                f"an update trained {update.tokens:.0f} tokens: expected {load.tokens}, and at most"
                " a tenth less in groups whose rewards are all equal; see research/benches/peer.py"
            )
    return updates


def compare(
    load: PeerLoad, model: Path, folder: Path, dtype: str, rounds: int, allocator: bool
) -> dict[str, Any]:  # fmt: skip
    """Interleaved rounds of both; each ratio is the median over the rounds, above 1 where ours is
    faster, below where it is smaller."""
    measured: dict[str, list[Round]] = {"peer": [], "ours": []}
    for number in range(rounds):
        for side, work in (("peer", partial(peer, allocator=allocator)), ("ours", ours)):
            measured[side].append(work(load, model, folder / f"{side}{number}", dtype))
            print(f"round {number}, {side}: {measured[side][-1]}", file=sys.stderr, flush=True)
    pairs = list(zip(measured["ours"], measured["peer"], strict=True))
    return {
        "tokens_ratio": statistics.median(a.tokens_s / b.tokens_s for a, b in pairs),
        "memory_ratio": statistics.median(a.peak_gib / b.peak_gib for a, b in pairs),
        **msgspec.to_builtins(measured),
    }


def run(
    model: str = DEFAULT, loads: tuple[Literal["groups", "slate"], ...] = ("groups", "slate"),
    dtype: Literal["float32", "bfloat16"] = "float32", rounds: Count = 3, allocator: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Compare all loads. The ratio is the worst of (tokens a second over its goal, memory of the
    peer over ours): 1 meets every goal. rounds: of each side. allocator: whether TRL too gets the
    settings of glibc with which Coppice starts; its users start it without."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy = endless(ensure_model(model, cache_folder()), folder / "model")
        rows = {}
        for name in loads:
            (folder / name).mkdir()
            rows[name] = compare(LOADS[name], copy, folder / name, dtype, rounds, allocator)
    worst = min(
        min(row["tokens_ratio"] / GOALS[name], 1 / row["memory_ratio"])
        for name, row in rows.items()
    )
    name = "side by side with TRL: ratio / its goal (worst)"
    return result(name, worst, 1.0, "higher", dtype=dtype, **rows)


# ------------------------------------------------------------------------ the process of TRL's side


def trl_settings(work: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of GRPOConfig. work: what ``peer`` writes."""
    per_step = work["sequences"] // work["steps"]
    return {
        "output_dir": str(folder / "trl"), "max_steps": work["updates"], "use_cpu": True,
        "model_init_kwargs": {"dtype": work["dtype"]}, "bf16": work["dtype"] == "bfloat16",
        "num_generations": work["samples"], "max_completion_length": work["action"],
        "per_device_train_batch_size": work["rows"],
        "gradient_accumulation_steps": work["sequences"] // work["rows"],
        "steps_per_generation": per_step // work["rows"], "shuffle_dataset": False,
        "temperature": 1.0, "beta": 0.0, "num_iterations": 1, "learning_rate": LR,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "disable_dropout": True,
        "save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "seed": 0,
    }  # fmt: skip


def train(work: dict[str, Any], folder: Path) -> None:
    """Train with TRL. At its end, each update appends to ``updates.jsonl`` the clock ("seconds")
    and the number of its trained "tokens"."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(THREADS)
    trained = [0]

    def rewards(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        trained[0] += sum(map(len, completion_ids))
        return [reward(text) for text in completions]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            line = json.dumps({"seconds": time.perf_counter(), "tokens": trained[0]})
            with (folder / "updates.jsonl").open("a") as out:
                out.write(line + "\n")
            trained[0] = 0

    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=rewards,
        args=GRPOConfig(**trl_settings(work, folder)),
        train_dataset=Dataset.from_dict({"prompt": work["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(work["model"], padding_side="left"),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0
        ),
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    work = Path(sys.argv[1])
    train(json.loads(work.read_text()), work.parent)
