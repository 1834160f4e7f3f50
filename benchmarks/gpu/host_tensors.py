"""Which tensors would be the host's own on a GPU as well, while a layer runs on a CPU as it would there: what is made without a
device, and what is made of such tensors alone. A copy that is brought to the device is the device's.
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
    """Knows, inside `with`, the tensors of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary()
        self.making = self.uploading = False  # a tensor of the host, or one of the device from it
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
        """As on a GPU, where the device has a copy."""
        found = to_device(*given)
        self.uploading = True
        try:
            return found.clone()
        finally:
            self.uploading = False

    def owns(self, given: Sequence[Tensor], made: Iterable[Tensor]) -> bool:
        """Whether an operation on tensors that are `given` is one of the host; those that are `made` are the host's then."""
        own = all(part in self.known for part in given) and not self.uploading if given else self.making
        for part in made if own else ():
            self.known[part] = True
        return own
