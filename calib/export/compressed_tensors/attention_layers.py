"""The names of a checkpoint's attention layers, found by building the model without its weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from calib.capture.capture import attention_modules
from calib.capture.model_sizes import check_sizes
from calib.errors import UsageError
from calib.export.compressed_tensors.checkpoint import Checkpoint
from calib.runtime.artifact.fingerprint import PROJECTIONS


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        layer: its number.
        name: its module's name, as in the names of the checkpoint's weights.
        slides: whether it has a sliding window.
    """

    layer: int
    name: str
    slides: bool


def model_without_weights(checkpoint: Checkpoint) -> PreTrainedModel:
    """Returns the model on the meta device, with only the key and value projections loaded, which the fingerprint needs.

    Quantised projections are not loaded, as they differ from the fitted model's. Raises `UsageError` if transformers
    cannot build the model.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder)
        check_sizes(config, str(checkpoint.folder))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except UsageError:
        raise
    except Exception as error:  # transformers raises many types; all mean that the model cannot be built
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"--model {checkpoint.folder}: cannot be built ({type(error).__name__}: {reason})") from error
    if checkpoint.quantization is None:
        for path, projection in projections(model):
            name = stored_name(model, f"{path}.weight", checkpoint)
            if name in checkpoint.files:
                projection.weight = nn.Parameter(checkpoint.tensor(name), requires_grad=False)
    return model


def attention_layers(model: PreTrainedModel, checkpoint: Checkpoint) -> list[AttentionLayer]:
    """Returns the layers in the model's order; raises `UsageError` if the checkpoint lacks a weight of one of them."""
    paths = {id(module): path for path, module in model.named_modules()}
    cached = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    layers = []
    for module in attention_modules(model):
        number, path = int(module.layer_idx), paths[id(module)]
        own = next(name for name, _ in module.named_children() if name in PROJECTIONS)
        end = f".{own}.weight"
        name = stored_name(model, path + end, checkpoint).removesuffix(end)
        if not any(weight.startswith(f"{name}.{own}.") for weight in checkpoint.files):
            raise UsageError(
                f"--model {checkpoint.folder}: no weight {name}{end}, where {type(model).__name__} has one; load the model "
                "with transformers and save_pretrained it"
            )
        slides = number < len(cached) and bool(getattr(cached[number], "is_sliding", False))
        layers.append(AttentionLayer(number, name, slides))
    return layers


def projections(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Returns names and modules of the projections whose weights are part of `calib.runtime.artifact.fingerprint`."""
    return ((path, module) for path, module in model.named_modules() if path.rpartition(".")[2] in PROJECTIONS)


def stored_name(model: PreTrainedModel, name: str, checkpoint: Checkpoint) -> str:
    """Returns the name of the parameter `name` in the checkpoint: the same, or the one under which transformers saves it."""
    if name in checkpoint.files:
        return name
    (renamed,) = revert_weight_conversion(model, {name: torch.empty(0, device="meta")})
    return str(renamed)
