"""The model of a plan: its modules built from the configuration on the `meta` device, and a model with one layer of it."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from calib.capture.gguf_rope import check_rope
from calib.capture.language_model import DTYPES, without_notes, without_waiting_for_the_hub
from calib.capture.model_files import ModelFiles
from calib.capture.model_sizes import check_sizes
from calib.capture.shape import Shape
from calib.errors import UsageError
from calib.runtime.messages.dtype_name import dtype_name

WORDS = 1024  # vocabulary size of the one-layer model, small so that its embedding costs almost nothing


@dataclass(frozen=True)
class MetaModel:
    """A model without weights.

    Attributes:
        model: all modules on the `meta` device, except the rotary embeddings (on the CPU).
        layer: the model's configuration reduced to one layer and a small vocabulary.
    """

    model: PreTrainedModel
    layer: Any

    @property
    def text(self) -> Any:
        """The decoder's configuration."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def shape(self) -> Shape:
        """The numbers of layers and heads, and head_dim."""
        return Shape.of(self.model)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(part.numel() for part in self.model.parameters())

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights and the model's buffers."""
        return sum(part.nbytes for part in (*self.model.parameters(), *self.model.buffers()))

    @cached_property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer in tokens, the query's own token included; None for full attention."""
        layers = DynamicCache(config=self.text).layers
        return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]

    @cached_property
    def compressed(self) -> list[int]:
        """Indices of the layers that a cache compresses: the full-attention layers, or the sliding ones if there are no others."""
        layers = DynamicCache(config=self.text).layers
        plain = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
        return plain or [number for number, window in enumerate(self.windows) if window is not None]

    @property
    def longest(self) -> int | None:
        """`max_position_embeddings` of the configuration: tokens of the longest sequence; None if it has no such entry."""
        return getattr(self.text, "max_position_embeddings", None)

    def content(self, path: str) -> dict[str, Any]:
        """Returns a plan's entry on the model at `path`, as plain JSON."""
        return {
            "path": path,
            "architecture": self.text.model_type,
            "parameters": self.parameters,
            "dtype": dtype_name(self.model.dtype),
            "weights_bytes": self.weights,
            **asdict(self.shape),
            "windows": self.windows,
            "compressed": self.compressed,
        }

    def one_layer(self) -> PreTrainedModel:
        """Returns a model of one layer on the `meta` device, whose embedding and head have a small vocabulary."""
        return without_weights(self.layer, self.model.dtype)


def read_meta_model(path: str, dtype: str) -> MetaModel:
    """Reads the configuration of the model at `path` (a folder, a GGUF file or a hub name) and builds the model without weights.

    `dtype` is a name of `DTYPES` or "auto". Raises UsageError if there is no configuration, or if no causal language model can be
    built from it.
    """
    found = ModelFiles.find(path)
    with without_waiting_for_the_hub(), without_notes():
        config = told(path, found.local, lambda: AutoConfig.from_pretrained(found.path, **found.options))
    check_sizes(config, path)
    check_rope(found, config)
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    wanted = (stored or torch.float32) if dtype == "auto" else DTYPES[dtype]
    with without_notes():
        return told(path, found.local, lambda: MetaModel(without_weights(config, wanted), one_layer(config)))


def told(path: str, local: bool, read: Callable[[], Any]) -> Any:
    """Returns `read()`; turn any exception into a UsageError of one line."""
    try:
        return read()
    except Exception as error:  # transformers raises many types; each means that this model cannot be planned for
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if local:
            raise UsageError(f"cannot build the model in '{path}' from its config.json ({reason})") from error
        raise UsageError(
            f"no folder '{path}' here, and the Hugging Face hub gave no config.json ({reason}); "
            "without network name a folder that holds the model"
        ) from error


def without_weights(config: Any, dtype: Any) -> PreTrainedModel:
    """Builds a configuration's model on the `meta` device, with real rotary embeddings, whose values the configuration sets."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    with_rotary_embeddings(model, torch.device("cpu"))
    return model.eval().requires_grad_(False)


def with_rotary_embeddings(model: nn.Module, device: torch.device) -> None:
    """Replaces the model's rotary embeddings by newly built ones on `device`."""
    for owner in list(model.modules()):
        for name, part in owner.named_children():
            buffers = [kind for kind, _ in part.named_buffers(recurse=False)]  # some models: one a kind of layer
            if any(kind.endswith("inv_freq") for kind in buffers) and hasattr(part, "config"):
                setattr(owner, name, type(part)(part.config).to(device))


def one_layer(config: Any) -> Any:
    """Returns a copy of `config` with the first layer only and a small vocabulary."""
    alone = copy.deepcopy(config)
    text = alone.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, value[:1])
    text.num_hidden_layers = 1
    text.vocab_size = min(text.vocab_size, WORDS)
    text.pad_token_id = None  # it may lie outside the reduced vocabulary
    return alone
