"""The oracle of a whole forward: decode the cache's stored tokens, then run the model on them in float64.

A `Shadow` is a float64 copy of a model with transformers' own attention. Before each forward with a compressed cache it decodes the
cache (`oracle.held_tokens`: from the formulas, without kernels), puts every row's tokens into the columns where the padding mask is
1, and runs the same inputs. Padding, and tokens that a sliding window has dropped, are GARBAGE that only a mask keeps out. Each
forward starts from the tokens stored now, so errors do not accumulate. If a forward itself chooses tokens to fetch from the host,
the shadow runs after it, with the same choice.

Tokens in tiers are in any order, and some are evicted. Keys have their positions in them (RoPE), so their columns do not matter:
they are put into the row's first columns, and a mask for that layer alone hides the others. With a sliding window this mask uses
the positions that the tiers store.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from offloaded_tokens import Moment
from oracle import GARBAGE, Held
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from calib.runtime.cache import CompressedCache
from calib.runtime.cache_argument import NAMES
from calib.runtime.layer import CompressedLayer

SOFT_CAPPED = "float64_soft_capped"


class Shadow:
    """The float64 copy of `model`; create it before any cache is attached to the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.twin = copy.deepcopy(model).double()
        if getattr(model.config, "attn_logit_softcapping", None):
            AttentionInterface.register(SOFT_CAPPED, soft_capped)
            AttentionMaskInterface.register(SOFT_CAPPED, sdpa_mask)
            self.twin.set_attn_implementation(SOFT_CAPPED)
        layers = DynamicCache(config=model.config).layers
        slides = [layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
        # If all layers slide they are compressed, and the window counts a row's tokens, without padding between them.
        self.sliding = slides[0] if len(slides) == len(layers) else None
        self._first: dict[str, CausalLMOutputWithPast] = {}  # outputs for prompts, which are the same for every method

    def asked(
        self, cache: CompressedCache, inputs: dict[str, Any], speculative: bool
    ) -> Callable[[], CausalLMOutputWithPast]:
        """Call this before a forward with the keyword arguments `inputs` (and, if `speculative`, a further speculative token); call
        the returned function after the forward: it gives the expected output for `inputs`."""
        forward = self._forward(cache, inputs, speculative)
        if cache.get_seq_length():
            return forward
        prompt = str(
            {
                name: entry.tolist() if isinstance(entry, Tensor) else entry
                for name, entry in inputs.items()
                if name not in NAMES
            }
        )
        if prompt not in self._first:
            self._first[prompt] = forward()
            self._first[prompt].past_key_values = None
        return lambda: self._first[prompt]

    def _forward(
        self, cache: CompressedCache, inputs: dict[str, Any], speculative: bool
    ) -> Callable[[], CausalLMOutputWithPast]:
        own = {name: value for name, value in inputs.items() if name not in (*NAMES, "attention_mask")}
        held, (rows, width) = cache.get_seq_length(), inputs["input_ids"].shape
        mask = inputs.get("attention_mask")
        real = torch.ones(rows, held + width, dtype=torch.bool) if mask is None else mask.bool()
        if cache.sequences.lengths:
            assert real[:, :held].sum(1).tolist() == cache.sequences.lengths, (
                "the cache holds other tokens than the mask shows"
            )
        # The model's default positions; they do not follow from the mask.
        own.setdefault("position_ids", torch.arange(held, held + width)[None])
        before = {
            number: [Moment(layer, row) for row in range(rows)]
            for number, layer in enumerate(cache.layers)
            if isinstance(layer, CompressedLayer) and layer.store is not None and held
        }
        past = DynamicCache()
        past.layers = [self._layer(layer) for layer in cache.layers]
        own["attention_mask"] = mask if self.sliding is None else self._seen(real, width)

        @torch.no_grad()
        def answer() -> CausalLMOutputWithPast:
            laid = {
                number: laid_out([moment.met(width + speculative, speculative) for moment in moments], real[:, :held])
                for number, moments in before.items()
            }
            for number, columns in laid.items():
                layer = past.layers[number]
                layer.keys, layer.values = columns.keys, columns.values
                layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
            with self._masks_of(laid, real, width):
                return self.twin(past_key_values=past, **own)

        return answer

    def _layer(self, layer: Any) -> DynamicLayer:
        if isinstance(layer, CompressedLayer):
            return DynamicLayer()
        past = copy.copy(layer)  # a sliding layer beside full ones is not compressed
        if layer.is_initialized:
            past.keys, past.values = layer.keys.double(), layer.values.double()
        past.record_past = False
        return past

    def _seen(self, real: Tensor, width: int, held: Tensor | None = None) -> Tensor:
        """The attention mask, bool `[rows, heads or 1, width, columns]`: the row's tokens up to each query (if all layers slide,
        the last `sliding` of them), and each query's own column.

        `held [rows, heads or 1, columns]` are the positions of the tokens in the columns before the forward's own, -1 for an empty
        column; without it they are in order.
        """
        position, columns = real.cumsum(1) - 1, torch.arange(real.shape[1])
        query, key = position[:, None, -width:, None], position.masked_fill(~real, -1)[:, None]
        if held is not None:
            key = torch.cat([held, key[:, :, -width:].expand(-1, held.shape[1], -1)], 2)
        key, own = key[:, :, None], columns[-width:, None]
        seen = (key >= 0) & (key <= query) & (columns <= own)
        if self.sliding is not None:
            seen &= key > query - self.sliding
        return seen | (columns == own)

    @contextmanager
    def _masks_of(self, laid: "dict[int, Columns]", real: Tensor, width: int) -> Iterator[None]:
        """A context in which layers whose tokens are not in order use attention masks of their own."""
        config, hooks = self.twin.config, []
        for part in self.twin.modules():
            columns = laid.get(getattr(part, "layer_idx", -1))
            if columns is None or columns.positions is None or not type(part).__name__.endswith("Attention"):
                continue
            groups = config.num_attention_heads // columns.keys.shape[1]
            mask = self._seen(real, width, columns.positions.repeat_interleave(groups, 1))

            def masked(module: nn.Module, given: Any, named: dict[str, Any], mask: Tensor = mask) -> Any:
                assert "attention_mask" in named
                return given, named | {"attention_mask": mask}

            hooks.append(part.register_forward_pre_hook(masked, with_kwargs=True))
        assert len(hooks) in (0, len(laid))
        yield
        for hook in hooks:
            hook.remove()


class Columns(NamedTuple):
    """A layer's tokens in columns: `keys` and `values [rows, kv_heads, columns, D]`, float64, GARBAGE in empty columns; and of
    tiers the `positions [rows, kv_heads, columns]`, -1 for an empty column, 0 if the tiers do not know positions."""

    keys: Tensor
    values: Tensor
    positions: Tensor | None


def laid_out(rows: list[Held], real: Tensor) -> Columns:
    """Put the tokens of a layer's `rows` into the columns where `real [rows, columns]` is True."""
    keys, values, positions = [], [], []
    for held, own in zip(rows, real, strict=True):
        at = own.nonzero()[: held.keys.shape[1], 0]
        for columns, part in ((keys, held.keys), (values, held.values)):
            columns.append(torch.full((part.shape[0], len(own), part.shape[2]), GARBAGE, dtype=torch.float64))
            columns[-1][:, at] = part
        positions.append(torch.full((len(held.keys), len(own)), -1))
        positions[-1][:, at] = 0 if held.positions is None else held.positions
    ordered = all(held.positions is not None and in_order(held.positions) for held in rows)
    return Columns(torch.stack(keys), torch.stack(values), None if ordered else torch.stack(positions))


def in_order(positions: Tensor) -> bool:
    """Whether `positions [kv_heads, T]` are 0 ... T - 1 in every head."""
    return torch.equal(positions, torch.arange(positions.shape[1]).expand(positions.shape))


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
    """Attention with a soft cap in the dtype of the query; transformers' own computes the softmax in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ key.mT * scaling / softcap) * softcap
    seen = torch.ones_like(scores, dtype=torch.bool).tril(scores.shape[3] - scores.shape[2])
    # Finite, so that the output of a padded query, which attends to nothing, is not NaN.
    scores = scores.masked_fill(~(seen if attention_mask is None else attention_mask), -1e300)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None
