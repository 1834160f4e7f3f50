"""Checks for accelerate's device maps, which spread one model over several devices, host memory and disk.

transformers loads the model by the map, and accelerate's hooks move each layer's input and weights to the device that
computes the layer. So a forward pass runs as usual; a capture only needs the device of the token ids (`entry_device`).
"""

from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel

from calib.errors import RunError, UsageError
from calib.runtime.messages.printable import printable

DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"]
MaxMemory = dict[int | str, int | str]


def check_device_map(device_map: str | None, max_memory: MaxMemory | None) -> None:
    """Raises UsageError for an unknown map, a bad `max_memory` or one without a map, or if accelerate is not installed."""
    if device_map is None:
        if max_memory is not None:
            raise UsageError("model.max_memory bounds what a device map uses: give model.device_map=auto as well")
        return
    if device_map not in get_args(DeviceMap):
        raise UsageError(f"model.device_map={printable(device_map)}: one of {', '.join(get_args(DeviceMap))}")
    for key in max_memory or {}:
        if key != "cpu" and not (isinstance(key, int) and key >= 0):
            raise UsageError(f"model.max_memory: {printable(key)} is no device; expected the number of a GPU, or cpu")
    if find_spec("accelerate") is None:
        raise UsageError(f"model.device_map={device_map} needs the package accelerate: pip install accelerate")


def check_one_process(device_map: str | None, processes: int) -> None:
    """Raises UsageError if several processes would each spread a model over the same devices."""
    if device_map is not None and processes > 1:
        raise UsageError(
            f"model.device_map={device_map} spreads one model over all devices, and each of {processes} processes needs a "
            "whole one of its own: give --trainer.devices 1, or no model.device_map"
        )


def check_token_ids(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Raises RunError if a token id is beyond the model's embedding (a GPU would only report an index out of range)."""
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if tokens.numel() and (largest := int(tokens.max())) >= rows:
        raise RunError(
            f"the tokenizer gives token {largest}, and the model has only 0 ... {rows - 1}: "
            "give it the tokenizer it was trained with"
        )


def entry_device(model: PreTrainedModel) -> torch.device:
    """Returns the device on which the model expects token ids: the one that computes the embedding, even if it is offloaded."""
    embedding: Any = model.get_input_embeddings()
    position = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return embedding.weight.device if position is None else torch.device(position)
