"""The load of both sides of ``tools.research.benches.peer``: the same questions, lengths and model.

The text consists of digits. Each digit is one token of the default tokenizer, so every length is known and no text costs more than another.
"""

from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoConfig, AutoTokenizer

from scheduler.tasks import GeneratedTasks
from scheduler.text import Text
from tools.research.benches.any_text import AnyText, Shape, State

DIGITS = "0123456789"
END = "<|no end|>"


class Load(msgspec.Struct, frozen=True):
    """One shape of work: questions per update, samples per step, tokens per action, and rows (sequences) per forward pass of the peer."""

    shape: Shape
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
    "groups": Load(Shape(steps=1, shared=27, question=12, observation=0), questions=8, samples=8, action=40, rows=8),
    "slate": Load(Shape(steps=3, shared=120, question=30, observation=60), questions=4, samples=5, action=40, rows=5),
}
"""Plain groups whose prompts are as long as in configs/slate-cpu.toml, and trees with the lengths of the other SLATE benchmarks."""


def prompts(load: Load, model: Path, seed: int, updates: int) -> list[str]:
    """Return the peer's prompts in order: by update, then by step, the whole prefix of each group of candidates once (TRL repeats it).

    The questions are those that a run of ``seed`` draws. Digits replace the trunk's actions, which a run would sample: they have the
    same number of tokens and are known beforehand. Raises ValueError if the tokenizer does not make one token of each digit.
    """
    text, environment = Text(str(model)), AnyText(load.shape, DIGITS)
    if len(text.encode(environment.words("", 100))) != 100:
        raise ValueError(
            f"{model}: its tokenizer merges digits, so the lengths of both sides would differ; choose another"
        )
    tasks, all_texts = GeneratedTasks(environment.task, seed), []
    for update in range(updates):
        drawn = [tasks.at(update * load.questions + place) for place in range(load.questions)]
        texts = [text.prompt(environment.prompt(task, State(task.seed))) for task in drawn]
        for step in range(1, load.shape.steps + 1):
            all_texts += texts
            after = [State(task.seed, step) for task in drawn]
            added = [environment.words(f"action {one}", load.action) + environment.observation(one) for one in after]
            texts = [before + more for before, more in zip(texts, added, strict=True)]
    return all_texts


def endless(model: Path, folder: Path) -> Path:
    """Make a copy of the model, with links to its weights, whose end-of-text token has no row in the model, so that it is never
    sampled and all samples of both sides have their full length. Raises ValueError."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"eos_token": END})
    end, rows = tokenizer.convert_tokens_to_ids(END), AutoConfig.from_pretrained(model).vocab_size
    if end < rows:
        raise ValueError(f"{model}: a new token gets id {end} of {rows}, which can be sampled; choose another model")
    tokenizer.save_pretrained(folder)
    for weights in model.glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights.resolve())
    (folder / "config.json").symlink_to((model / "config.json").resolve())
    settings = msgspec.json.decode((model / "generation_config.json").read_bytes(), type=dict[str, Any])
    (folder / "generation_config.json").write_bytes(msgspec.json.encode(settings | {"eos_token_id": end}))
    return folder
