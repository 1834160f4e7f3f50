"""Forward passes that begin at a later layer, where all below it is as in an earlier pass over the same tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from calib.capture.capture import attention_modules


class LayerOutputs:
    """What each decoder layer of a model put out in one pass.

    A decoder layer is what an attention module is a part of.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        attention = {id(module) for module in attention_modules(model)}
        paths = [name for name, module in model.named_modules() if id(module) in attention]
        self.layers = {
            int(model.get_submodule(path).layer_idx): model.get_submodule(path.rpartition(".")[0]) for path in paths
        }
        self.outputs: dict[int, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The pass in here is the earlier one."""

        def keep(number: int) -> Any:
            def hook(_: nn.Module, __: object, output: Any) -> None:
                self.outputs[number] = output

            return hook

        handles = [layer.register_forward_hook(keep(number)) for number, layer in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def begun_at(self, layer: int) -> Iterator[None]:
        """Passes in here compute `layer` and those above it; those below put out what they did, and leave a cache as it is."""
        below = [(module, self.outputs[number]) for number, module in self.layers.items() if number < layer]
        own = [vars(module).get("forward") for module, _ in below]  # accelerate's, of a layer that lies elsewhere
        try:
            for module, output in below:
                module.forward = _constant(output)
            yield
        finally:
            for (module, _), forward in zip(below, own, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward


def _constant(output: Any) -> Any:
    def forward(*_: object, **__: object) -> Any:
        return output

    return forward
