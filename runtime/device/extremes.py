"""The least and the largest number of a tensor, asked for now and read by the host later."""

import torch
from torch import Tensor


class Extremes:
    """Of `[..., any]`; on their way to the host from when this is made.

    Reading them waits for what the device was given before, and for nothing that it was given since: whoever queues a prompt's
    attention in between leaves the device busy while the host goes on. Without `__dict__` it weighs nothing in a report of memory.
    """

    __slots__ = ("_copied", "_dtype", "_on_host")

    def __init__(self, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        self._copied: torch.cuda.Event | None = None
        if tensor.is_meta:  # no numbers: as if all were small
            self._on_host = torch.zeros(2)
            return
        self._on_host = found = torch.stack(tensor.aminmax())
        if found.is_cuda:
            self._on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._on_host.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(found.device))

    def read(self) -> Tensor:
        """Both, `[1, 1, 2, 1]` in the tensor's dtype on the host: two tokens of one channel that stand for all."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._on_host.to(self._dtype)[None, None, :, None]

    def __deepcopy__(self, memo: dict[int, object]) -> "Extremes":
        """An event belongs to one object: the copy has been read."""
        found = Extremes.__new__(Extremes)
        self.read()
        found._dtype, found._on_host, found._copied = self._dtype, self._on_host, None
        return found
