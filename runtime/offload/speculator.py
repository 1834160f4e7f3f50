"""Speculative decoding steps (SpeCache): a forward of one token becomes one of two, the token and the one that probably follows.

The caller sees the logits of the true token alone. Those of the speculative token choose the next speculative token. This
works in every loop that decodes token by token, of transformers or the caller's own, greedy or sampling.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.utils import ModelOutput

from calib.runtime.cache_argument import cache_in
from calib.runtime.layer import CompressedLayer
from calib.runtime.paging.sequence_state import SequenceState


class Speculator:
    """The speculative tokens of one cache: `tokens` int64 `[rows]`, or None if none was predicted since the last prompt.

    `before` and `after` are hooks of the model's forward.
    """

    def __init__(self, sequences: SequenceState, layers: list[CacheLayerMixin]) -> None:
        """`sequences` and `layers` are those of the cache; the speculative token is cropped from layers that are not compressed.

        Raises ValueError for recurrent layers, which cannot be cropped.
        """
        self.sequences = sequences
        self.others = [layer for layer in layers if not isinstance(layer, CompressedLayer)]
        for layer in self.others:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                raise ValueError(
                    "every step would also process a speculative token, and recurrent layers of this model "
                    f"({type(layer).__name__}) cannot remove it from their states; pass speculative=False"
                )
        self.tokens: Tensor | None = None
        self._taken_along = self._first_is_under_way = False
        self._held: list[int] = []

    def forget(self) -> None:
        """Drops the speculative tokens, and ends a forward that was interrupted; the next step predicts again."""
        self.tokens = None
        if self._taken_along:
            self._taken_along = False
            self._end()

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        if self.tokens is not None:
            self.tokens = self.tokens[sources.to(self.tokens.device)]

    def before(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Adds the speculative token to a forward of one token; the arguments of any other forward stay as they are."""
        if args:  # convert to keyword arguments
            named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | named
        if getattr(cache_in(named), "speculator", None) is not self or self._first_is_under_way:
            return None
        if self._taken_along:  # that forward was interrupted before `after`
            self.forget()
        ids: Any = named.get("input_ids")
        if not self._is_step(ids, named):
            self.forget()
            return None
        if self.tokens is None or len(self.tokens) != len(ids):
            self.tokens = self._first(model, named)
        self._begin()
        self._taken_along = True
        return (), _longer(named) | {"input_ids": torch.cat([ids, self.tokens[:, None]], 1)}

    def after(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        """Removes the speculative token's logits from the output; also ends a forward that failed."""
        if not self._taken_along or getattr(cache_in(named), "speculator", None) is not self:
            return None
        self._taken_along = False
        self._end()
        if not isinstance(output, ModelOutput):
            self.forget()
            return None
        self.tokens = output["logits"][:, -1].argmax(-1)
        output["logits"] = output["logits"][:, :-1]
        if output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(states[:, :-1] for states in output["hidden_states"])
        return output

    def _first(self, model: nn.Module, named: dict[str, Any]) -> Tensor:
        """Pre-decoding (SpeCache, Algorithm 2): runs the true token as a speculative one, so that the tokens it attends are
        fetched."""
        self._begin()
        self._first_is_under_way = True
        try:
            tokens: Tensor = model(**named).logits[:, -1].argmax(-1)
        finally:
            self._first_is_under_way = False
            self._end()
        return tokens

    def _is_step(self, ids: Any, named: dict[str, Any]) -> bool:
        """Whether a forward has one token for each row, and arguments to which a column can be added."""
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        return (
            isinstance(ids, Tensor)
            and ids.shape == (len(self.sequences.lengths), 1)
            and all(self.sequences.lengths)
            and not self.sequences.recording
            and named.get("labels") is None
            and named.get("return_dict") is not False
            and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
            and (positions is None or (isinstance(positions, Tensor) and positions.shape[-1] == 1))
            and not isinstance(named.get("logits_to_keep"), Tensor)
        )

    def _begin(self) -> None:
        self.sequences.speculating = True
        for layer in self.others:
            layer.activate_past_recording()
        self._held = [layer.get_seq_length() for layer in self.others]

    def _end(self) -> None:
        self.sequences.speculating = False
        for layer, held in zip(self.others, self._held, strict=True):
            if layer.get_seq_length() > held:  # not if the forward failed before this layer
                layer.crop(-1)
            layer.record_past = False


def _longer(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, extended by one column."""
    longer = dict(named)
    if isinstance(named.get("attention_mask"), Tensor):
        mask = named["attention_mask"]
        longer["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    for name in ("position_ids", "cache_position"):
        if isinstance(named.get(name), Tensor):
            longer[name] = torch.cat([named[name], named[name] + 1], -1)
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):  # the last one's, as in generate()
        if isinstance(named.get(name), Tensor):
            longer[name] = torch.cat([named[name], named[name][..., -1:]], -1)
    if named.get("logits_to_keep"):
        longer["logits_to_keep"] = named["logits_to_keep"] + 1
    return longer
