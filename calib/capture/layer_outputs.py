"""Forward passes that start at a later layer and reuse the outputs of the layers below from an earlier pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from calib.capture.capture import attention_modules


class LayerOutputs:
    """The outputs of each decoder layer in one forward pass, for later passes over the same tokens.

    A decoder layer is the parent of an attention module.
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
        """Context in which a forward pass has its layers' outputs recorded."""

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
        """Context in which passes compute only `layer` and the layers above; those below return their recorded outputs.

        The layers below do not update a cache.
        """
        below = [(module, self.outputs[number]) for number, module in self.layers.items() if number < layer]
        own = [vars(module).get("forward") for module, _ in below]  # set by accelerate's hooks on offloaded layers
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
