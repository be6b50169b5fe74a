"""A Hugging Face causal LM that reads forests. It serves as the policy and as the body of the
critic and the implicit reward model."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig

from coppice.common import vision
from coppice.common.hardware import compute_dtype, free_memory
from coppice.common.support import Support
from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.learner.forest.attention import FOREST, Backend, Layout
from coppice.learner.forest.head import token_logprobs
from coppice.learner.forest.trees import Forest, Path
from coppice.learner.model import loading
from coppice.learner.model.frozen import hold
from coppice.learner.model.ranks import Ranks, whole


class Row(msgspec.Struct, frozen=True):
    """One packed row for the model. If layout is None, the row is a single path for the model's own
    causal attention.

    positions: [tokens], or [3, tokens] if the row has pictures, which are in view. support: that of
    the targets (``learner.trees.Forest``). read, target: each pair once. again: the pair of each
    target of the paths, int64 [targets], None if no pair occurs twice.
    """

    tokens: Any
    positions: Any
    read: Any
    target: Any
    layout: Layout | None
    nodes: int
    view: vision.View | None = None
    support: Support | None = None
    again: np.ndarray | None = None


class Tower(torch.nn.Module):
    """The model and its head in one forward, so that sharded parameters are gathered whenever they
    are used.

    A forward returns (log-probabilities, entropies) of the targets, or (values, values) of the
    states before them; float32 [targets]. Log-probabilities and entropies are those of the
    distribution over the row's support.
    """

    def __init__(self, model: Any, temperature: float, values: bool):
        super().__init__()
        self.model, self.temperature = model, temperature
        width = model.get_output_embeddings().weight.shape[1]
        self.value = torch.nn.Linear(width, 1) if values else None
        if self.value is not None:
            # an untrained critic must not change the advantages
            torch.nn.init.zeros_(self.value.weight)
            torch.nn.init.zeros_(self.value.bias)

    @property
    def causal(self) -> Any:
        """The causal LM without any adapters."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def _inputs(self, row: Row, device: str) -> dict[str, torch.Tensor]:
        """Return the ids of a row, or its embeddings if it has pictures, and its positions."""
        ids, where = (
            torch.as_tensor(values, device=device) for values in (row.tokens, row.positions)
        )
        if row.view is None:
            return {"input_ids": ids[None], "position_ids": where[None]}
        patches, grids, rows = (
            torch.as_tensor(values, device=device)
            for values in (row.view.patches, row.view.grids, row.view.rows)
        )
        trains = any(parameter.requires_grad for parameter in self.causal.model.visual.parameters())
        with contextlib.nullcontext() if trains else torch.no_grad():
            features = vision.encode(self.causal, patches, grids)
        return {
            "inputs_embeds": vision.embed(self.causal, ids, features, rows),
            "position_ids": where[:, None],
        }

    def forward(
        self, row: Row, device: str, compute: torch.dtype, initial: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal = self.causal
        forest = (
            {"layout": row.layout, "attention_mask": FOREST.to(device)}
            if row.layout is not None
            else {}
        )
        kind = torch.device(device).type
        adapters = self.model.disable_adapter() if initial else contextlib.nullcontext()
        with (
            adapters,
            torch.autocast(kind, dtype=torch.bfloat16, enabled=compute == torch.bfloat16),
        ):
            out = causal.get_decoder()(**self._inputs(row, device), use_cache=False, **forest)
            hidden = out.last_hidden_state[0][torch.as_tensor(row.read, device=device)]
            if self.value is not None:
                # values rounded to bfloat16 would shift every advantage
                with torch.autocast(kind, enabled=False):
                    values = torch.nn.functional.linear(
                        hidden.float(), self.value.weight.float(), self.value.bias.float()
                    )[:, 0]
                return values, values.clone()
        weight, target = (
            causal.get_output_embeddings().weight,
            torch.as_tensor(row.target, device=device),
        )
        return token_logprobs(hidden.to(compute), weight, target, self.temperature, row.support)


class TreeModel:
    """A model of the learner, which construction loads, adapts and places. Trained weights are
    float32; compute is float32, or bfloat16 by autocast.

    passes: the forwards of all models of this process, which show that an update moves."""

    passes: ClassVar[int] = 0

    def __init__(
        self, folder: str, config: LearnerConfig, lora: LoraConfig, temperature: float, ranks: Ranks, seed: int = 0, values: bool = False, reference: bool = False
    ):  # fmt: skip
        check_fits(FilePath(folder), lora, ranks, reference)
        torch.manual_seed(seed)  # gives every rank the same initial adapters
        self.config, self.ranks, self.device = config, ranks, ranks.device
        self.compute: torch.dtype = getattr(torch, compute_dtype(config.dtype))
        model = loading.load(folder, ranks.sharded)
        check_head(folder, model)
        self.vision = vision.Vision.of(folder)
        if config.train_vision and self.vision is None:
            raise ValueError(
                f"learner.train_vision has no effect on {folder}, which reads text only: remove it"
            )
        blind = self.vision is not None and not config.train_vision
        if blind:
            model.model.visual.requires_grad_(False)
        self.lora = lora.rank > 0
        if self.lora:
            adapters = PeftLora(
                r=lora.rank,
                lora_alpha=lora.alpha,  # pyright: ignore
                target_modules="all-linear",
                exclude_modules=r".*\bvisual\..*" if blind else None,
                lora_dropout=0.0,
            )
            model = loading.adapt(model, adapters)
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        tower = Tower(model, temperature, values)
        if values:
            for parameter in tower.causal.get_output_embeddings().parameters():
                if parameter is not tower.causal.get_input_embeddings().weight:
                    parameter.requires_grad_(False)  # a critic does not use the head
        for module in tower.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # a dropped token would differ between the paths that share it
        layer = type(tower.causal.get_decoder().layers[0]).__name__
        self.tower: Any = ranks.place(tower.train(), layer, self.compute)
        if ranks.sharded:
            loading.fill(self.tower, folder, self.device)
        if self.lora and self.device.startswith("cpu") and not ranks.sharded:
            hold(model, self.compute, ranks)
        # Captured only here, because between two forwards a sharded module may expose complete
        # parameters instead of the trained shards.
        self._trained = {
            name.removeprefix("model."): p
            for name, p in self.tower.named_parameters()
            if p.requires_grad
        }

    @property
    def model(self) -> Any:
        """The Hugging Face model, including its adapters."""
        return self.tower.model

    @property
    def causal(self) -> Any:
        """The causal LM without any adapters."""
        return self.tower.causal

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that train, by name."""
        return self._trained

    def gathered(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return every complete trained parameter on the CPU, if ``keep``. If the model is sharded,
        this is a collective."""
        complete = ((name, whole(p)) for name, p in self._trained.items())
        return {name: tensor for name, tensor in complete if keep}

    def row(self, forest: Forest, attention: Backend | None = None) -> Row:
        """Return the row of a forest. attention: a backend to use instead of the configured one."""
        layout = Layout(forest, attention or self.config.attention, self.device)
        packed = layout.forest
        positions, view = self._look(packed.tokens, packed.depth, packed.end, forest.pictures)
        read, target, again = _distinct(forest)
        return Row(
            packed.tokens,
            positions,
            read,
            target,
            layout,
            forest.nodes,
            view,
            forest.support,
            again,
        )

    def plain_row(self, path: Path) -> Row:
        """Return the row of one path for the model's own causal attention, with which the
        self-check compares the forest."""
        n, start = len(path.tokens), path.start
        positions, view = self._look(
            np.asarray(path.tokens), np.arange(n), np.full(n, n), path.pictures
        )
        read, target = torch.arange(start - 1, n - 1), path.tokens[start:]
        return Row(path.tokens, positions, read, target, None, n, view, path.support)

    def _look(
        self, tokens: np.ndarray, depth: np.ndarray, end: np.ndarray, pictures: Mapping[int, bytes]
    ) -> tuple[np.ndarray, vision.View | None]:
        """Return the positions of a forest's nodes, and its pictures if it has any."""
        needed = vision.numbers(tokens)
        if not needed:
            return depth, None
        if self.vision is None:
            raise ValueError(
                f"a turn shows pictures {needed[:5]}, and the learner's model reads text only: expected the policy's model"
            )
        positions = vision.places(tokens, depth, end, self.vision.grids(pictures, needed))
        return positions, self.vision.view(tokens, pictures)

    def read(
        self, row: Row, initial: bool = False, compute: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tower's two outputs [targets]. compute: a number type to use instead of the
        run's."""
        TreeModel.passes += 1
        outputs = self.tower(row, self.device, compute or self.compute, initial)
        if row.again is None:
            return outputs
        again = torch.as_tensor(row.again, device=self.device)
        return outputs[0][again], outputs[1][again]

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Run forwards without gradient. Afterwards the model is sharded again."""
        with torch.no_grad():
            yield
        if isinstance(self.tower, FSDPModule):
            self.tower.reshard()


class Policy(TreeModel):
    """The policy. It gives log-probabilities of trained tokens under its current and under its
    initial weights. reference: hold a frozen copy of the initial weights, which a policy with
    adapters does not need."""

    def __init__(
        self, folder: str, config: LearnerConfig, temperature: float, ranks: Ranks, seed: int = 0, lora: LoraConfig | None = None, reference: bool = False
    ):  # fmt: skip
        super().__init__(
            folder,
            config,
            config.lora if lora is None else lora,
            temperature,
            ranks,
            seed,
            reference=reference,
        )
        self._reference: TreeModel | None = None
        if reference:
            self._reference = TreeModel(
                folder, config, LoraConfig(rank=0), temperature, ranks, seed
            )
            self._reference.tower.requires_grad_(False)

    def logprobs(self, forest: Forest) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies [trained tokens], in the order of the paths."""
        return self.read(self.row(forest))

    def reference_logprobs(self, forest: Forest) -> torch.Tensor:
        """Return log-probabilities under the initial policy (adapters off, or the frozen copy),
        without gradient."""
        model = self if self.lora else self._reference
        assert model is not None, (
            "a policy whose weights all train was loaded without its reference"
        )
        with torch.no_grad():
            return model.read(model.row(forest), initial=self.lora)[0]


def _distinct(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the distinct pairs of read node and target, and the pair of each target, None if all
    are distinct.

    Paths that share trained tokens, as the leaves of a tree of whole trajectories do, then pass the
    head once for all of them. Targets with a support keep a row each, because equal tokens of two
    versions may have been sampled from different supports.
    """
    pairs = np.stack([forest.read, forest.target])
    distinct, again = np.unique(pairs, axis=1, return_inverse=True)
    if forest.support is not None or distinct.shape == pairs.shape:
        return forest.read, forest.target, None
    return distinct[0], distinct[1], again.reshape(-1)


def check_head(folder: str, model: Any) -> None:
    """Raise ValueError if the model changes its logits after the head or its scores inside
    attention, which the learner does not do."""
    text = model.config.get_text_config()
    plain = {
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "logits_scaling": 1.0,
        "logit_scale": 1.0,
    }
    for key, expected in plain.items():
        value = getattr(text, key, expected)
        if value is not None and value != expected:
            raise ValueError(
                f"{folder}: {key} = {value} changes what the learner's head computes: expected {expected}; train another model"
            )


def check_fits(folder: FilePath, lora: LoraConfig, ranks: Ranks, reference: bool = False) -> None:
    """Check before loading that the weights, gradients and optimizer state of one rank fit into
    memory.

    Raises FileNotFoundError if the folder has no weights, and MemoryError with the estimate and the
    remedy if they do not fit.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not size:
        raise FileNotFoundError(f"model folder {folder} holds no .safetensors file")
    stored = str(getattr(AutoConfig.from_pretrained(folder), "dtype", "float32"))
    weights = size * (1 if "32" in stored else 2)
    copies = 1.2 if lora.rank else 4.0 + (1.0 if reference else 0.0)
    needed = weights * copies / ranks.shards
    free = torch.cuda.mem_get_info()[0] if ranks.device.startswith("cuda") else free_memory()
    if needed > free:
        raise MemoryError(
            f"{folder}: one learner rank needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: use fewer ranks"
            " (learner.count), LoRA (learner.lora.rank), learner.sharding = 'fsdp' over more ranks or a smaller model"
        )
