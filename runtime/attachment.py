"""Attaches a cache to its model: the model uses calib's attention while any cache is attached, and its own again afterwards."""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from calib.runtime import attention
from calib.runtime.cache_argument import cache_in
from calib.runtime.graphs.step_graphs import replaying
from calib.runtime.layer import CompressedLayer
from calib.runtime.offload.speculator import Speculator
from calib.runtime.paging.sequence_state import SequenceState


@dataclass
class _Holds:
    """The attachments of one model: their number, its configs with the attention they named before, and one hook for all."""

    saved: list[tuple[Any, str | None]]
    check: RemovableHandle
    number: int = 0


# Threads may share a model. Reentrant: a cache that is garbage-collected while the lock is held releases its attachment.
_changing = threading.RLock()

_held: "weakref.WeakKeyDictionary[nn.Module, _Holds]" = weakref.WeakKeyDictionary()

# For each model one entry per attachment with graphs; the first is the `forward` set on the instance before, None if none was.
_replaying: "weakref.WeakKeyDictionary[nn.Module, list[Any]]" = weakref.WeakKeyDictionary()


class Attachment:
    """One attachment of a cache to a model, from its construction to `release`. It does not keep the model alive."""

    def __init__(
        self,
        model: PreTrainedModel,
        told: SequenceState | None = None,
        speculator: Speculator | None = None,
        replays: bool = False,
    ) -> None:
        """Attaches to `model`.

        Args:
            model: the model, which gets calib's attention with its first attachment.
            told: the rows that are given the token ids of every forward, where the model gets ids; None: no ids are passed on.
            speculator: adds speculative tokens to decode steps, through hooks of the model's forward; None: no speculation.
            replays: whether the model's `forward` is wrapped, so that a cache with graphs can replay decode steps.
        """
        self._model: weakref.ref[PreTrainedModel] | None = weakref.ref(model)
        self._told, self._replays, self._hooks = told is not None, replays, []
        with _changing:
            if model not in _held:
                _held[model] = _Holds(_attached(model), model.register_forward_pre_hook(_check_used, with_kwargs=True))
            _held[model].number += 1
            if replays:
                forwards = _replaying.setdefault(model, [])
                forwards.append(model.__dict__.get("forward"))
                if len(forwards) == 1:
                    model.forward = replaying(model.forward)
        if speculator is not None:
            ours = weakref.ref(speculator)
            self._hooks += [
                model.register_forward_pre_hook(partial(_before, ours), with_kwargs=True),
                model.register_forward_hook(partial(_after, ours), with_kwargs=True, always_call=True),
            ]
        if told is not None:
            rows = weakref.ref(told)
            self._hooks += [
                model.get_input_embeddings().register_forward_pre_hook(partial(_tell, rows)),
                # Also after a failed forward, or one through another cache, whose ids are not these rows'.
                model.base_model.register_forward_hook(partial(_forget, rows), always_call=True),
            ]

    def release(self) -> None:
        """Ends the attachment; does nothing when repeated, or when the model is gone."""
        with _changing:
            model, self._model = self._current(), None
            for hook in self._hooks:
                hook.remove()
            if model is None or model not in _held:
                return
            if self._replays:
                _give_back(model)
            holds = _held[model]
            holds.number -= 1
            if not holds.number:
                del _held[model]
                holds.check.remove()
                _put_back(holds.saved)

    @property
    def released(self) -> bool:
        """Whether the attachment has ended."""
        return self._model is None

    def again(self, sequences: SequenceState, speculator: Speculator | None) -> "Attachment | None":
        """A new attachment to the same model, for a copy of the cache; None where this one has ended."""
        model = self._current()
        return (
            None if model is None else Attachment(model, sequences if self._told else None, speculator, self._replays)
        )

    def _current(self) -> PreTrainedModel | None:
        return None if self._model is None else self._model()


def _attached(model: PreTrainedModel) -> list[tuple[Any, str | None]]:
    """Sets calib's attention in the model's configs, and returns each config with the attention that it named before."""
    attention.register()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(part.config): part.config for part in parts}
    saved = [(config, config._attn_implementation_internal) for config in configs.values()]
    model.set_attn_implementation(attention.NAME)
    # Encoders of images or sound attend in both directions and keep their own attention.
    decoder = model.get_decoder()
    attending = {id(part.config) for part in parts if _on_one_path(part, decoder)}
    _put_back((config, implementation) for config, implementation in saved if id(config) not in attending)
    return saved


def _on_one_path(part: nn.Module, decoder: nn.Module) -> bool:
    """Whether `part` is a module of the decoder, or contains the decoder."""
    return any(inner is part for inner in decoder.modules()) or any(inner is decoder for inner in part.modules())


def _put_back(saved: Iterable[tuple[Any, str | None]]) -> None:
    for config, implementation in saved:
        config._attn_implementation_internal = implementation


def _give_back(model: PreTrainedModel) -> None:
    """Restores the model's own `forward` after the last attachment that replays."""
    forwards = _replaying[model]
    if len(forwards) > 1:
        forwards.pop()
        return
    (own,) = _replaying.pop(model)
    if own is None:
        del model.forward
    else:
        model.forward = own


def _check_used(model: nn.Module, _: Any, named: dict[str, Any]) -> None:
    """Refuses two uses of a compressed cache by generate(). With use_cache=False it passes the whole text at every step, which
    would be stored again. For a text no longer than what the cache holds it passes no token, or tokens that the cache holds."""
    unused, tokens = named.get("use_cache") is False, named.get("input_ids")
    width = tokens.shape[-1] if isinstance(tokens, Tensor) else 1
    if not unused and width == 1:  # a decode step does not wait for positions
        return
    cache = cache_in(named)
    if not any(isinstance(layer, CompressedLayer) for layer in getattr(cache, "layers", ())):
        return
    if unused:
        raise ValueError("use_cache=False with a compressed cache: pass use_cache=True, or leave out the cache")
    columns = cache.get_seq_length()
    if not width or _repeats(named, width, columns):
        raise ValueError(
            f"the cache holds {columns} columns, and the text has no more: no token is new; give the whole "
            "conversation with its new turn, or call cache.reset() before another text"
        )


def _repeats(named: dict[str, Any], width: int, columns: int) -> bool:
    """Whether these `width` tokens are what generate() leaves of a text of n tokens, fewer than the `columns` of the cache.

    It passes `tokens[-(n - columns):]`, whose start is then counted from the front: the last 2 n - columns tokens, at their
    positions in the text. A padded text has a mask, which does not fit the cache and is refused with it.
    """
    positions = named.get("position_ids")
    if (
        not columns
        or named.get("attention_mask") is not None
        or not isinstance(positions, Tensor)
        or positions.ndim != 2
    ):
        return False
    if torch.compiler.is_compiling():  # reading a position would break the graph
        return False
    n = (width + columns) // 2
    return n < columns and 2 * n == width + columns and int(positions[0, -1]) == n - 1


def _tell(told: "weakref.ref[SequenceState]", embedding: nn.Module, given: tuple[Any, ...]) -> None:
    sequences = told()
    if sequences is not None and given:
        sequences.ids = given[0]


def _forget(told: "weakref.ref[SequenceState]", *_: Any) -> None:
    sequences = told()
    if sequences is not None:
        sequences.ids = None


def _before(speculator: "weakref.ref[Speculator]", *given: Any) -> Any:
    ours = speculator()
    return None if ours is None else ours.before(*given)


def _after(speculator: "weakref.ref[Speculator]", *given: Any) -> Any:
    ours = speculator()
    return None if ours is None else ours.after(*given)
