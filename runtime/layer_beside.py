"""Functions on transformers' own layers that stay uncompressed beside compressed ones: sliding windows, and layers with
recurrent states instead of keys and values (Qwen3-Next, LFM2, Granite 4)."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from calib.runtime.files.state import State, StateError, tensor_like
from calib.runtime.messages.dtype_name import dtype_name


def kept(layer: Any) -> list[Tensor]:
    """The tensors that the layer keeps: its keys and values, or its states."""
    states = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    parts = [
        getattr(layer, "keys", None),
        getattr(layer, "values", None),
        *(part for own in states for part in own.values()),
    ]
    return [part for part in parts if part is not None]


def let_go(layer: Any) -> None:
    """Copies the layer's keys and values out of a larger tensor, such as a whole prompt, so that it can be freed."""
    for name in ("keys", "values") if getattr(layer, "keys", None) is not None else ():
        part = getattr(layer, name)
        # In a decode step transformers cuts off one token: not worth a copy.
        if part.untyped_storage().nbytes() > 1.02 * part.numel() * part.element_size():
            setattr(layer, name, part.clone())


def move(layer: Any, device: torch.device) -> None:
    """Moves the layer's tensors to `device`."""

    def moved(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: moved(own) for name, own in part.items()}
        return part.to(device) if isinstance(part, Tensor) else part

    if kept(layer):
        vars(layer).update(moved(vars(layer)), device=device)


def empty(layer: Any) -> None:
    """Returns the layer to its initial state: its own `reset` keeps tensors, and with them the batch size."""
    made_with = {name: getattr(layer, name) for name in ("sliding_window", "number_of_states") if hasattr(layer, name)}
    vars(layer).update(vars(type(layer)(**made_with)))


def state_of(layer: Any) -> State:
    """What a file needs of the layer: its window, dtype and columns seen. Raises StateError unless it is a sliding-window layer."""
    if type(layer) is not DynamicSlidingWindowLayer:
        raise StateError(f"a {type(layer).__name__} beside the compressed layers cannot be saved")
    if not layer.is_initialized:
        return {}
    seen = int(layer.cumulative_length)
    # While past recording is on, a layer also keeps tokens older than its window, until it is cropped.
    first = max(0, layer.keys.shape[2] - layer.sliding_window + 1)
    keys, values = layer.keys[:, :, first:], layer.values[:, :, first:]
    return {"keys": keys, "values": values, "dtype": dtype_name(keys.dtype), "seen": seen}


def restore(layer: Any, state: State, like: tuple[Tensor, Tensor], rows: int, seen: int) -> None:
    """Fills an empty layer from `state`, as `state_of` returned it. `like` are keys and values `[any, kv_heads, any, head_dim]`
    of the model's dtype and device; the batch has `rows`, and `seen` columns were seen. Raises StateError where the state does
    not fit."""
    slots = min(seen, layer.sliding_window - 1)
    found = [
        tensor_like(state, name, part.new_zeros(()).expand(rows, part.shape[1], slots, part.shape[3]))
        for name, part in zip(("keys", "values"), like, strict=True)
    ]
    layer.lazy_initialization(*found)
    layer.keys, layer.values, layer.cumulative_length = *found, seen
