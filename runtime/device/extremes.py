"""The minimum and maximum of a tensor, computed now and read by the host later."""

import weakref

import torch
from torch import Tensor

from calib.kernels.channel_ranges.operation import extremes_of


class Extremes:
    """Extremes of a tensor `[rows, kv_heads, tokens, channels]`; their copy to the host starts with the construction.

    Reading waits for the work queued before the construction only. Whoever queues a prompt's attention in between keeps the
    device busy while the host goes on. Without `__dict__` the object does not count in `memory.tensors`.
    """

    __slots__ = ("_by_channel", "_copied", "_dtype", "_of", "_on_host")

    def __init__(self, tensor: Tensor, by_channel: bool = False) -> None:
        """With `by_channel`, extremes by channel are computed as well, for `of_channels`."""
        self._dtype, self._of = tensor.dtype, weakref.ref(tensor)
        self._copied: torch.cuda.Event | None = None
        self._by_channel = extremes_of(tensor) if by_channel and not tensor.is_meta else None
        if tensor.is_meta:  # no values: treated as small
            self._on_host = torch.zeros(2, dtype=torch.float32)
            return
        source = tensor.detach() if self._by_channel is None else self._by_channel
        # In memory order: torch would copy transposed tensors, as values are, and extremes do not depend on the order.
        source = source.permute(sorted(range(source.ndim), key=source.stride, reverse=True))
        self._on_host = found = source.new_empty(2)
        torch.aminmax(source, out=(found[0], found[1]))
        if found.is_cuda:
            self._on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._on_host.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(found.device))

    def read(self) -> Tensor:
        """Both extremes, `[1, 1, 2, 1]` in the tensor's dtype on the host: like two tokens of one channel that stand for all."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._on_host.to(self._dtype)[None, None, :, None]

    def of_channels(self, tokens: Tensor) -> Tensor | None:
        """The extremes by channel (`channel_ranges.extremes_of`), if `tokens` is the very tensor given; else None."""
        given = self._of()
        same = given is not None and (given.data_ptr(), given.shape, given.stride(), given.dtype) == (
            tokens.data_ptr(), tokens.shape, tokens.stride(), tokens.dtype
        )  # fmt: skip
        return self._by_channel if same else None

    def __deepcopy__(self, memo: dict[int, object]) -> "Extremes":
        """Reads the extremes first: an event belongs to one object, so the copy has none."""
        found = Extremes.__new__(Extremes)
        self.read()
        found._dtype, found._on_host, found._copied = self._dtype, self._on_host, None
        found._of, found._by_channel = self._of, self._by_channel
        return found
