"""The peer's side of ``tools.research.benches.peer``: TRL's GRPOTrainer on the prompts of a file, run in the environment that has trl.

``python -m tools.research.benches.peer_trl WORK.json``. The settings should make TRL fast on a CPU: no gradient checkpointing, no reference
model, no dropout, no logging, evaluation or checkpoints, one batch of ``generate`` for all prompts of one length (so nothing is padded)
with its cache of keys and values, log-probabilities of the completions alone, none of them computed twice, and one group of sequences
per forward pass (other numbers were not tried). Generation and training take turns in one process on all threads.

trl is imported only inside the functions that use it, because the environment of this project does not have it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tools.research.benches.any_text import reward


def settings(work: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of GRPOConfig. work: see ``tools.research.benches.peer``."""
    per_step = work["sequences"] // work["steps"]
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": work["updates"],
        "use_cpu": True,
        "model_init_kwargs": {"dtype": work["dtype"]},
        "bf16": work["dtype"] == "bfloat16",
        "num_generations": work["samples"],
        "max_completion_length": work["action"],
        "per_device_train_batch_size": work["rows"],
        "gradient_accumulation_steps": work["sequences"] // work["rows"],
        "steps_per_generation": per_step // work["rows"],
        "shuffle_dataset": False,
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "learning_rate": work["lr"],
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": work["seed"],
    }


def train(work: dict[str, Any], folder: Path) -> None:
    """Train. At its end, each update appends to ``updates.jsonl`` the clock ("seconds") and the number of its trained "tokens"."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports] (of the other environment, as trl)
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(work["threads"])
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
        args=GRPOConfig(**settings(work, folder)),
        train_dataset=Dataset.from_dict({"prompt": work["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(work["model"], padding_side="left"),
        peft_config=LoraConfig(r=work["rank"], lora_alpha=work["alpha"], target_modules="all-linear", lora_dropout=0.0),
        callbacks=[Clock()],
    )
    trainer.train()


def main() -> None:
    """Run the peer once, in the folder of its work file."""
    path = Path(sys.argv[1])
    train(json.loads(path.read_text()), path.parent)


if __name__ == "__main__":
    main()
