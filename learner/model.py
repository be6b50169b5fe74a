"""The policy as the learner holds it: a Hugging Face causal LM, with LoRA adapters or trained whole, read through its forest."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

import psutil
import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from learner.config import LearnerConfig
from learner.head import token_logprobs
from learner.trees import Path, dense_masks, pack
from wire.hardware import compute_dtype


class Policy:
    """Loads and runs the policy. Master weights are float32; compute is float32 or bfloat16 by autocast."""

    def __init__(self, folder: str, config: LearnerConfig, temperature: float, device: str = "cpu", seed: int = 0):
        check_fits(FilePath(folder), config, device)
        torch.manual_seed(seed)  # adapters start equal on every rank
        self.config, self.temperature, self.device = config, temperature, device
        self.compute: torch.dtype = getattr(torch, compute_dtype(config.dtype))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.lora = config.lora.rank > 0
        self.reference: Any = None
        if self.lora:
            adapters = PeftLora(
                r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules="all-linear", lora_dropout=0.0  # pyright: ignore
            )  # fmt: skip
            model = get_peft_model(model, adapters)
        elif config.kl_coef > 0:
            frozen: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.reference = frozen.to(device).eval()
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        self.model: Any = model.to(device).train()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # a dropped token would differ between the paths that share it

    @property
    def causal(self) -> Any:
        """The causal LM under the adapters, if any."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that train, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, paths: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Log-probabilities and entropies [trained tokens], paths in order, and the packed tokens forwarded."""
        forest = pack(paths)
        made = self._forward(self.causal, forest.tokens, forest.depth, forest)
        return *self._read(self.causal, made, forest.read, forest.target), len(forest.tokens)

    @torch.no_grad()
    def plain_logprobs(self, path: Path) -> torch.Tensor:
        """The same for one path by an ordinary causal forward: what the forest is checked against."""
        positions = torch.arange(len(path.tokens)).numpy()
        hidden = self._forward(self.causal, path.tokens, positions, None)
        read = torch.arange(path.start - 1, len(path.tokens) - 1).numpy()
        return self._read(self.causal, hidden, read, path.tokens[path.start :])[0]

    @torch.no_grad()
    def reference_logprobs(self, paths: Sequence[Path]) -> torch.Tensor:
        """Log-probabilities under the initial policy: the adapters switched off, or the frozen copy."""
        forest = pack(paths)
        with self._initial() as model:
            hidden = self._forward(model, forest.tokens, forest.depth, forest)
            return self._read(model, hidden, forest.read, forest.target)[0]

    @contextlib.contextmanager
    def _initial(self) -> Iterator[Any]:
        if self.lora:
            with self.model.disable_adapter():
                yield self.causal
        else:
            yield self.reference

    def _forward(self, model: Any, tokens: Any, positions: Any, forest: Any) -> torch.Tensor:
        """Hidden states [tokens, width] of one packed row."""
        ids = torch.as_tensor(tokens, device=self.device)[None]
        where = torch.as_tensor(positions, device=self.device)[None]
        mask = None
        if forest is not None:
            text = model.config.get_text_config()
            kinds = getattr(text, "layer_types", None) or ["full_attention"]
            mask = dense_masks(forest, kinds, getattr(text, "sliding_window", None), self.compute, self.device)
        kind = torch.device(self.device).type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=self.compute == torch.bfloat16):
            out = model.get_decoder()(input_ids=ids, position_ids=where, attention_mask=mask, use_cache=False)
        return out.last_hidden_state[0]

    def _read(self, model: Any, hidden: torch.Tensor, read: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden[torch.as_tensor(read, device=self.device)].to(self.compute)
        weight = model.get_output_embeddings().weight
        return token_logprobs(rows, weight, torch.as_tensor(target, device=self.device), self.temperature)


def check_fits(folder: FilePath, config: LearnerConfig, device: str) -> None:
    """Raise before loading when the weights, gradients and optimizer state of one rank cannot fit.

    Raises FileNotFoundError for a folder without weights, MemoryError with the estimate and the remedy.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not size:
        raise FileNotFoundError(f"model folder {folder} holds no .safetensors file")
    stored = str(getattr(AutoConfig.from_pretrained(folder), "dtype", "float32"))
    weights = size * (1 if "32" in stored else 2)
    copies = 1.2 if config.lora.rank else 4.0 + (1.0 if config.kl_coef > 0 else 0.0)
    needed = weights * copies
    free = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else psutil.virtual_memory().available
    if needed > free:
        raise MemoryError(
            f"{folder}: one learner rank needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: use fewer ranks"
            " (learner.count), LoRA (learner.lora.rank) or a smaller model"
        )
