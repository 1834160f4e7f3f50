"""The oracle of a whole forward: decode what the cache holds, then run the model on it in float64.

A `Shadow` is a float64 twin of a model with transformers' own attention. Before each forward through a compressed cache
it decodes the cache (`oracle.held_tokens`: the formulas, none of the kernels), lays every row's tokens out in the columns
where the padding mask is 1, and answers the same inputs. Padding, and tokens that a sliding window has left behind, are
garbage that only a mask keeps out. Each forward starts from what is stored now, so no error is carried along.
"""

import copy
from typing import Any

import oracle
import torch
from oracle import GARBAGE
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer

SOFT_CAPPED = "float64_soft_capped"


class Shadow:
    """The float64 twin of `model`; made before any cache is attached to the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.twin = copy.deepcopy(model).double()
        if getattr(model.config, "attn_logit_softcapping", None):
            AttentionInterface.register(SOFT_CAPPED, soft_capped)
            AttentionMaskInterface.register(SOFT_CAPPED, sdpa_mask)
            self.twin.set_attn_implementation(SOFT_CAPPED)
        layers = DynamicCache(config=model.config).layers
        slides = [layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
        # Where every layer slides they are compressed, and the window counts a row's tokens, not the columns between.
        self.sliding = slides[0] if len(slides) == len(layers) else None
        self._first: dict[str, CausalLMOutputWithPast] = {}  # answers to prompts: the same for every method

    @torch.no_grad()
    def answer(self, cache: CompressedCache, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
        """What the model should answer to a forward's keyword arguments `inputs`, before the cache has seen them."""
        if cache.get_seq_length():
            return self._forward(cache, inputs)
        prompt = str(
            {
                name: entry.tolist() if isinstance(entry, Tensor) else entry
                for name, entry in inputs.items()
                if name != "past_key_values"
            }
        )
        if prompt not in self._first:
            self._first[prompt] = self._forward(cache, inputs)
            self._first[prompt].past_key_values = None
        return self._first[prompt]

    def _forward(self, cache: CompressedCache, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
        own = {name: value for name, value in inputs.items() if name not in ("past_key_values", "attention_mask")}
        held, (rows, width) = cache.get_seq_length(), inputs["input_ids"].shape
        mask = inputs.get("attention_mask")
        real = torch.ones(rows, held + width, dtype=torch.bool) if mask is None else mask.bool()
        if cache.rows.lengths:
            assert real[:, :held].sum(1).tolist() == cache.rows.lengths, (
                "the cache holds other tokens than the mask shows"
            )
        past = DynamicCache()
        past.layers = [self._layer(layer, real[:, :held]) for layer in cache.layers]
        own["attention_mask"] = mask if self.sliding is None else self._window(real, width)
        return self.twin(past_key_values=past, **own)

    def _layer(self, layer: Any, real: Tensor) -> DynamicLayer:
        if not isinstance(layer, CompressedLayer):
            past = copy.copy(layer)  # a layer that slides beside full ones stays as transformers keeps it
            if layer.is_initialized:
                past.keys, past.values = layer.keys.double(), layer.values.double()
            past.record_past = False
            return past
        past = DynamicLayer()
        if layer.store is not None and real.shape[1]:
            past.keys, past.values = (laid_out(layer, stream, real) for stream in layer.store.streams)
            past.dtype, past.device, past.is_initialized = past.keys.dtype, past.keys.device, True
        return past

    def _window(self, real: Tensor, width: int) -> Tensor:
        """bool `[rows, 1, width, columns]`: the last `sliding` tokens of the row itself, and each query's own column."""
        place = real.cumsum(1) - 1
        key, query = place[:, None, :], place[:, -width:, None]
        columns = torch.arange(real.shape[1])
        itself = columns == columns[-width:, None]
        seen = real[:, None, :] & (key <= query) & (key > query - self.sliding) & (columns <= columns[-width:, None])
        return (seen | itself)[:, None]


def laid_out(layer: CompressedLayer, stream: Any, real: Tensor) -> Tensor:
    """A stream's tokens in the columns where `real [rows, columns]` is True, GARBAGE elsewhere: float64."""
    first = stream.window.tokens
    columns = torch.full((*first.shape[:2], real.shape[1], first.shape[3]), GARBAGE, dtype=torch.float64)
    for row, places in enumerate(real):
        columns[row][:, places] = oracle.held_tokens(layer, stream, row)
    return columns


def soft_capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with a soft cap in the dtype of the query; transformers' own rounds the softmax to float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ key.mT * scaling / softcap) * softcap
    seen = torch.ones_like(scores, dtype=torch.bool).tril(scores.shape[3] - scores.shape[2])
    # Finite, so that a padded query, which sees nothing, does not become NaN.
    scores = scores.masked_fill(~(seen if attention_mask is None else attention_mask), -1e300)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None
