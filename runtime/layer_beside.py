"""transformers' own layers, which stay as they are beside compressed ones: sliding windows, and layers with states in place of
keys and values (Qwen3-Next, LFM2, Granite 4). What a cache does to them that they do not."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from calib.runtime.files.state import State, StateError, named, tensor_like


def kept(layer: Any) -> list[Tensor]:
    """What the layer keeps of the tokens that it has seen."""
    states = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    parts = [
        getattr(layer, "keys", None),
        getattr(layer, "values", None),
        *(part for own in states for part in own.values()),
    ]
    return [part for part in parts if part is not None]


def let_go(layer: Any) -> None:
    """Copies what the layer keeps out of a larger tensor, such as a whole prompt, which can then be freed."""
    for name in ("keys", "values") if getattr(layer, "keys", None) is not None else ():
        part = getattr(layer, name)
        # In a decode step transformers cuts off one token: not worth a copy.
        if part.untyped_storage().nbytes() > 1.02 * part.numel() * part.element_size():
            setattr(layer, name, part.clone())


def move(layer: Any, device: torch.device) -> None:
    """Moves what the layer keeps to `device`."""

    def moved(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: moved(own) for name, own in part.items()}
        return part.to(device) if isinstance(part, Tensor) else part

    if kept(layer):
        vars(layer).update(moved(vars(layer)), device=device)


def empty(layer: Any) -> None:
    """Makes the layer as it was made: its own `reset` keeps tensors, and with them the number of rows."""
    made_with = {name: getattr(layer, name) for name in ("sliding_window", "number_of_states") if hasattr(layer, name)}
    vars(layer).update(vars(type(layer)(**made_with)))


def state_of(layer: Any) -> State:
    """What the layer needs of what it keeps, for a file; StateError for a layer of another kind."""
    if type(layer) is not DynamicSlidingWindowLayer:
        raise StateError(f"a {type(layer).__name__} beside the compressed layers cannot be saved")
    if not layer.is_initialized:
        return {}
    seen = int(layer.cumulative_length)
    # While past recording is on, a layer keeps tokens behind its window as well, until it is cropped.
    first = max(0, layer.keys.shape[2] - layer.sliding_window + 1)
    keys, values = layer.keys[:, :, first:], layer.values[:, :, first:]
    return {"keys": keys, "values": values, "dtype": named(keys.dtype), "seen": seen}


def restore(layer: Any, state: State, like: tuple[Tensor, Tensor], rows: int, seen: int) -> None:
    """See `state_of`; for an empty layer, keys and values `like [any, kv_heads, any, head_dim]`, and `seen` columns."""
    slots = min(seen, layer.sliding_window - 1)
    found = [
        tensor_like(state, name, part.new_zeros(()).expand(rows, part.shape[1], slots, part.shape[3]))
        for name, part in zip(("keys", "values"), like, strict=True)
    ]
    layer.lazy_initialization(*found)
    layer.keys, layer.values, layer.cumulative_length = *found, seen
