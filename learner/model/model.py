"""A Hugging Face causal LM that reads forests. It serves as the policy and as the body of the
critic and the implicit reward model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule

from coppice.common import vision
from coppice.common.hardware import compute_dtype, free_memory
from coppice.common.routing import Routers
from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.learner.forest import recurrence
from coppice.learner.forest.attention import FOREST, Backend, Layout, on
from coppice.learner.forest.head import token_logprobs
from coppice.learner.forest.trees import Forest
from coppice.learner.model import loading, memory
from coppice.learner.model.ranks import Ranks, whole

_NOISE = ("p", "jitter_noise", "input_jitter_noise")
"""Names of numbers, beside those that end in "dropout", by which a module trains with noise."""


class Tower(torch.nn.Module):
    """The model and its head in one forward, so that sharded parameters are gathered whenever they
    are used. It returns (log-probabilities, entropies) of the forest's targets over their support,
    or (values, values) of the states before them; float32 [targets]."""

    def __init__(
        self, model: Any, temperature: float, values: bool, recurrent: bool,
        routers: Routers | None = None,
    ):  # fmt: skip
        super().__init__()
        self.routers = routers
        self.model, self.temperature, self.recurrent = model, temperature, recurrent
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

    def _inputs(
        self, layout: Layout, positions: np.ndarray, view: vision.View | None
    ) -> dict[str, torch.Tensor]:
        """Return the ids of a forest, or its embeddings if it has pictures, and its positions."""

        def here(array: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(array, device=layout.device)

        ids, where = here(layout.forest.tokens), here(positions)
        if view is None:
            return {"input_ids": ids[None], "position_ids": where[None]}
        trains = any(parameter.requires_grad for parameter in self.causal.model.visual.parameters())
        with contextlib.nullcontext() if trains else torch.no_grad():
            features = vision.encode(self.causal, here(view.patches), here(view.grids))
        embeddings = vision.embed(self.causal, ids, features, here(view.rows))
        return {"inputs_embeds": embeddings, "position_ids": where[:, None]}

    def forward(
        self, layout: Layout, positions: np.ndarray, view: vision.View | None,
        compute: torch.dtype, initial: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """positions: [nodes], or [3, nodes] with pictures, which are in ``view``. initial: without
        the adapters."""
        causal, device = self.causal, layout.device
        read, target, again = _distinct(layout.forest)
        tree: dict[str, Any] = {}
        if layout.backend != "causal":
            tree = {"layout": layout, "attention_mask": FOREST.to(device)}
            if self.recurrent:
                tree |= recurrence.segments(layout.forest, device)
        if self.routers is not None and layout.forest.experts is not None and not initial:
            experts = torch.as_tensor(layout.forest.experts, dtype=torch.long, device=device)
            tree["experts"] = experts.unflatten(1, (self.routers.layers, -1))
        kind = torch.device(device).type
        adapters = self.model.disable_adapter() if initial else contextlib.nullcontext()
        narrow = compute == torch.bfloat16
        with adapters, torch.autocast(kind, dtype=torch.bfloat16, enabled=narrow):
            inputs = self._inputs(layout, positions, view)
            out = causal.get_decoder()(**inputs, **tree, use_cache=False)
            hidden = out.last_hidden_state[0][torch.as_tensor(read, device=device)]
        if self.value is not None:
            # in float32: values rounded to bfloat16 would shift every advantage
            weight, bias = self.value.weight.float(), self.value.bias.float()
            values = torch.nn.functional.linear(hidden.float(), weight, bias)[:, 0]
            outputs = values, values.clone()
        else:
            weight = causal.get_output_embeddings().weight
            targets, support = torch.as_tensor(target, device=device), layout.forest.support
            outputs = token_logprobs(hidden.to(compute), weight, targets, self.temperature, support)
        if again is None:
            return outputs
        expand = torch.as_tensor(again, device=device)
        return outputs[0][expand], outputs[1][expand]


class TreeModel:
    """A model of the learner, which construction loads, adapts and places. Trained weights are
    float32; compute is float32, or bfloat16 by autocast, in which the frozen weights of linear
    layers are held then. values: a critic. reference: hold a ``frozen`` copy of the initial
    weights, which a policy with adapters does not need. routed: tokens go to the experts that their
    paths name."""

    passes: ClassVar[int] = 0
    """The forwards of all models of this process, which show that an update moves."""

    def __init__(
        self, folder: str, config: LearnerConfig, temperature: float, ranks: Ranks, seed: int = 0,
        lora: LoraConfig | None = None, values: bool = False, reference: bool = False,
        frozen: bool = False, routed: bool = False,
    ):  # fmt: skip
        lora = lora or config.lora
        torch.manual_seed(seed)  # gives every rank the same initial adapters
        self.config, self.ranks, self.device = config, ranks, ranks.device
        self.compute: torch.dtype = getattr(torch, compute_dtype(config.dtype))
        on(self.device, config.attention)  # refuses one that does not train there
        model = loading.load(folder, ranks.sharded)
        recurrent = check_layers(folder, model)
        self.routers = Routers(model) if routed else None
        if routed and not self.routers:
            raise ValueError(
                f"learner.routing_replay has no effect on {folder}, whose layers have no router of"
                " experts: remove it"
            )
        self.vision = vision.Vision.of(folder)
        if config.train_vision and self.vision is None:
            raise ValueError(
                f"learner.train_vision has no effect on {folder}, which reads text only: remove it"
            )
        frozen_eyes = self.vision is not None and not config.train_vision
        if frozen_eyes:
            model.model.visual.requires_grad_(False)
        self.lora = lora.rank > 0
        if self.lora:
            excluded = r".*\bvisual\..*" if frozen_eyes else None
            settings: Any = {"r": lora.rank, "lora_alpha": lora.alpha, "exclude_modules": excluded}
            # "all-linear" would also adapt joined experts, whose adapters no engine takes
            head, linear = model.get_output_embeddings(), torch.nn.Linear
            modules = model.named_modules()
            names = [n for n, m in modules if isinstance(m, linear) and m is not head]
            # kernels of state-space layers, which have a convolution, read it past an adapter
            past = {f"{n}.out_proj" for n, m in model.named_modules() if hasattr(m, "conv1d")}
            names = [n for n in names if n not in past]
            loading.check_names(folder, names)
            adapters = PeftLora(target_modules=names, lora_dropout=0.0, **settings)
            model = loading.adapt(model, adapters)
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        tower = Tower(model, temperature, values, recurrent, self.routers)
        if values:
            for parameter in tower.causal.get_output_embeddings().parameters():
                if parameter is not tower.causal.get_input_embeddings().weight:
                    parameter.requires_grad_(False)  # a critic does not use the head
        for module in tower.modules():
            # a dropped token would differ between the paths that share it
            for name, value in vars(module).items():
                if isinstance(value, float) and (name in _NOISE or name.endswith("dropout")):
                    setattr(module, name, 0.0)
        if frozen:
            tower.requires_grad_(False)
        loading.narrow(model, self.compute)
        layer = type(tower.causal.get_decoder().layers[0]).__name__
        self.tower: Any = ranks.place(tower.train(), layer, self.compute)
        if ranks.sharded:
            loading.fill(self.tower, folder, self.device)
        if (self.lora or frozen) and self.device.startswith("cpu") and not ranks.sharded:
            loading.hold(model, ranks)
        self.model: Any = self.tower.model
        """The Hugging Face model, including its adapters."""
        self.causal: Any = self.tower.causal
        """The causal LM without any adapters."""
        # Captured only here, because between two forwards a sharded module may expose complete
        # parameters instead of the trained shards.
        named = self.tower.named_parameters()
        self._trained = {n.removeprefix("model."): p for n, p in named if p.requires_grad}
        self.initial: TreeModel = self
        if reference:
            none = LoraConfig(rank=0)
            self.initial = TreeModel(folder, config, temperature, ranks, seed, none, frozen=True)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that train, by name."""
        return self._trained

    def gathered(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return every complete trained parameter on the CPU, if ``keep``: a collective."""
        complete = ((name, whole(p).cpu().contiguous()) for name, p in self._trained.items())
        return {name: tensor for name, tensor in complete if keep}

    def read(
        self, forest: Forest, initial: bool = False, compute: torch.dtype | None = None,
        attention: Backend | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return log-probabilities and entropies (of a critic: values, twice) [targets], in the
        order of the paths. initial: without the adapters. compute, attention: used instead of the
        run's; "causal" reads a forest of one path."""
        layout = Layout(forest, attention or self.config.attention, self.device)
        positions, view = self._look(layout.forest)
        TreeModel.passes += 1
        return self.tower(layout, positions, view, compute or self.compute, initial)

    def _look(self, forest: Forest) -> tuple[np.ndarray, vision.View | None]:
        """Return the positions of a forest's nodes, and its pictures if it has any."""
        tokens, pictures, needed = forest.tokens, forest.pictures, vision.numbers(forest.tokens)
        if not needed:
            return forest.depth, None
        if self.vision is None:
            raise ValueError(f"a turn shows pictures {needed[:5]}, and the model reads text only")
        grids = self.vision.grids(pictures, needed)
        positions = vision.places(tokens, forest.depth, forest.end, grids)
        return positions, self.vision.view(tokens, pictures)

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Run forwards without gradient. Afterwards the model is sharded again."""
        with torch.no_grad():
            yield
        if isinstance(self.tower, FSDPModule):
            self.tower.reshard()


def _distinct(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the distinct pairs of read node and target, and the pair of each target, None if all
    are distinct: trained tokens that paths share pass the head once.

    Targets with a support keep a row each, because equal tokens of two versions may have been
    sampled from different supports.
    """
    pairs = np.stack([forest.read, forest.target])
    distinct, again = np.unique(pairs, axis=1, return_inverse=True)
    if forest.support is not None or distinct.shape == pairs.shape:
        return forest.read, forest.target, None
    return distinct[0], distinct[1], again.reshape(-1)


_FOLLOWS = {"full_attention", "sliding_attention", "attention", "chunked_attention"}
"""Types of layers that can attend along the branches of a tree."""


def check_layers(folder: str, model: Any) -> bool:
    """Return whether layers hand a state from token to token, which then follows the tree. Raise
    ValueError if a state cannot, or for attention sinks, which no backend computes yet."""
    decoder, kind = model.get_decoder(), model.config.model_type
    if not hasattr(decoder, "layers"):
        raise ValueError(
            f"{folder} ({kind}) has no decoder with layers: expected a model"
            " built as Llama is; train another model (docs/models.md)"
        )
    if any(name.endswith(".sinks") for name, _ in decoder.layers.named_parameters()):
        raise ValueError(
            f"{folder} ({kind}) has attention sinks: expected softmax attention without them;"
            " train another model (docs/models.md)"
        )
    others = set(getattr(decoder.config, "layer_types", None) or []) - _FOLLOWS
    convolutions = (isinstance(m, torch.nn.Conv1d) for m in decoder.layers.modules())
    recurrent = bool(others) or any(convolutions)
    if recurrent and (reason := recurrence.install(model)):
        raise ValueError(
            f"{folder} ({kind}) has layers whose state cannot follow a tree: {reason}; train"
            " another model (docs/models.md)"
        )
    return recurrent


def check_fits(folder: str, config: LearnerConfig, ranks: Ranks) -> None:
    """Check before loading that all models of one rank fit into its memory together, with
    gradients, moments, copies and activations. Raises FileNotFoundError if the folder has no
    weights, and MemoryError if they do not fit."""
    shape, weights = memory.sizes(FilePath(folder))
    if not weights:
        raise FileNotFoundError(f"model folder {folder} holds no .safetensors file")
    size = 2 if compute_dtype(config.dtype) == "bfloat16" else 4
    config = msgspec.structs.replace(config, count=ranks.count, shard_ranks=ranks.shards)
    on_gpu = ranks.device.startswith("cuda")
    free = torch.cuda.mem_get_info()[0] if on_gpu else free_memory()
    parts = memory.rank_parts(config, shape, weights, size)
    if not on_gpu:  # of main memory the launcher's estimate warns
        parts.pop("activations", None)
    if why := memory.lacks(parts, free / 2**30):
        raise MemoryError(f"{folder}: a learner rank needs {why}")
