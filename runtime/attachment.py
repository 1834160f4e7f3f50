"""A cache's hold on its model: while one lasts, the model's attention is ours; after the last it is exactly as before."""

import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from calib.runtime import attention

# Holds on each model at this moment, and what its configs said before the first of them.
_held: "weakref.WeakKeyDictionary[nn.Module, tuple[int, list[tuple[Any, str | None]]]]" = weakref.WeakKeyDictionary()


class Attachment:
    """One hold, from its making to `release`. It does not keep the model alive."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: weakref.ref[PreTrainedModel] | None = weakref.ref(model)
        count, saved = _held.get(model, (0, []))
        if not count:
            attention.register()
            configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
            saved = [(config, config._attn_implementation_internal) for config in configs.values()]
            model.set_attn_implementation(attention.NAME)
        _held[model] = (count + 1, saved)

    def release(self) -> None:
        """Ends the hold; harmless when repeated, or when the model is gone."""
        model, self._model = self._current(), None
        if model is None or model not in _held:
            return
        count, saved = _held.pop(model)
        if count > 1:
            _held[model] = (count - 1, saved)
            return
        for config, implementation in saved:
            config._attn_implementation_internal = implementation

    def again(self) -> "Attachment | None":
        """A hold of its own on the same model; None where this one has ended."""
        model = self._current()
        return None if model is None else Attachment(model)

    def _current(self) -> PreTrainedModel | None:
        return None if self._model is None else self._model()
