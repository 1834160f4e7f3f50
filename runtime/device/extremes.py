"""The least and the largest number of a tensor, asked for now and read by the host later."""

import weakref

import torch
from torch import Tensor

from calib.kernels.channel_ranges.operation import extremes_of


class Extremes:
    """Of `[rows, kv_heads, tokens, channels]`; on their way to the host from when this is made.

    Reading them waits for what the device was given before, and for nothing that it was given since: whoever queues a prompt's
    attention in between leaves the device busy while the host goes on. Without `__dict__` it weighs nothing in a report of memory.
    """

    __slots__ = ("_by_channel", "_copied", "_dtype", "_of", "_on_host")

    def __init__(self, tensor: Tensor, by_channel: bool = False) -> None:
        """`by_channel`: `of_channels` will be asked for, of all the same tokens."""
        self._dtype, self._of = tensor.dtype, weakref.ref(tensor)
        self._copied: torch.cuda.Event | None = None
        self._by_channel = extremes_of(tensor) if by_channel and not tensor.is_meta else None
        if tensor.is_meta:  # no numbers: as if all were small
            self._on_host = torch.zeros(2)
            return
        source = tensor.detach() if self._by_channel is None else self._by_channel
        # As it lies: torch copies what is transposed, as values are, and extremes are the same in any order.
        source = source.permute(sorted(range(source.ndim), key=source.stride, reverse=True))
        self._on_host = found = source.new_empty(2)
        torch.aminmax(source, out=(found[0], found[1]))
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

    def of_channels(self, tokens: Tensor) -> Tensor | None:
        """What `channel_ranges.extremes_of` found, where `tokens` are the whole tensor as it was given."""
        given = self._of()
        same = given is not None and (given.data_ptr(), given.shape, given.stride(), given.dtype) == (
            tokens.data_ptr(), tokens.shape, tokens.stride(), tokens.dtype
        )  # fmt: skip
        return self._by_channel if same else None

    def __deepcopy__(self, memo: dict[int, object]) -> "Extremes":
        """An event belongs to one object: the copy has been read."""
        found = Extremes.__new__(Extremes)
        self.read()
        found._dtype, found._on_host, found._copied = self._dtype, self._on_host, None
        found._of, found._by_channel = self._of, self._by_channel
        return found
