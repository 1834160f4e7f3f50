"""Finds, while a layer runs on a CPU, the tensors that would be on the host if it ran on a GPU: those created without a device, and
results of such tensors alone. A copy made by `upload` counts as a tensor of the device.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from calib.kernels.upload import upload as to_device

FACTORIES = {"arange", "empty", "from_numpy", "full", "ones", "rand", "randn", "randperm", "tensor", "zeros"}


class HostTensors(TorchFunctionMode):
    """Mode that records, inside `with`, which tensors are the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary()
        self.making = self.uploading = False  # whether a host tensor, or a device copy of one, is being created
        self.replaced = ExitStack()

    def __enter__(self) -> "HostTensors":
        for module in list(sys.modules.values()):
            if vars(module).get("upload") is to_device:
                self.replaced.enter_context(mock.patch.object(module, "upload", self._uploaded))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.replaced.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in FACTORIES and kwargs.get("device") is None:
            return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    def _made(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.making = True
        try:
            found = func(*args, **kwargs)
        finally:
            self.making = False
        self.known[found] = True
        return found

    def _uploaded(self, *given: Any) -> Tensor:
        """Returns a copy, as `upload` does on a GPU."""
        found = to_device(*given)
        self.uploading = True
        try:
            return found.clone()
        finally:
            self.uploading = False

    def owns(self, given: Sequence[Tensor], made: Iterable[Tensor]) -> bool:
        """Returns whether an operation on the tensors `given` runs on the host; if so, record its results `made` as the host's."""
        own = all(part in self.known for part in given) and not self.uploading if given else self.making
        for part in made if own else ():
            self.known[part] = True
        return own
