"""Host memory for keys and values: pinned and read in place by a GPU's attention, ordinary memory without a GPU."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calib.runtime.device.side_stream import SideStream
from calib.runtime.paging.pool import Memory


class PinnedKV:
    """Pages `[pages, kv_heads, page_tokens, Dk + Dv]` in host memory: a token's key and value are adjacent, one row to fetch.

    Dk and Dv are the channels of keys and of values. The pools of keys and of values each use a view of one allocation, which
    they get from `of`; they grow together. `pairs` is the newest allocation, as the device sees it.
    """

    def __init__(self, key_width: int, value_width: int) -> None:
        self.widths = (key_width, value_width)
        self.pairs: Tensor | None = None
        self._taken: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PinnedKV":
        """Copies into host memory as well: torch, which sees the device's view, would copy it into device memory. Copy this
        before the pools, whose tensors are views of `pairs`."""
        copied = PinnedKV(*self.widths)
        memo[id(self)], copied._taken = copied, set(self._taken)
        if self.pairs is not None:
            copied.pairs = host_zeros(tuple(self.pairs.shape), self.pairs.dtype, self.pairs.device).copy_(self.pairs)
            storages = memo.setdefault("torch", {})  # type: ignore[call-overload]  # where torch looks for copies of storages
            storages[self.pairs.untyped_storage()._cdata] = copied.pairs.untyped_storage()
            memo[id(self.pairs)] = copied.pairs
        return copied

    def of(self, role: str) -> Memory:
        """Returns the function that allocates pages for the pool of "keys" or "values"."""
        return partial(self._zeros, role)

    def _zeros(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        whole = (*shape[:-1], sum(self.widths))
        if self.pairs is None or role in self._taken or self.pairs.shape != whole:
            self.pairs, self._taken = host_zeros(whole, dtype, device), set()
        self._taken.add(role)
        return self.pairs.split(self.widths, -1)[role == "values"]


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros in host memory. For a CUDA device they are pinned, and the tensor is the device's own view of them: kernels
    read and write them in place, without a copy and without waiting for the host. If memory cannot be pinned, warns and returns
    ordinary memory, which the host copies to and from the device.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype)
    if not all(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        with torch.cuda.device(device):  # pinning creates a context on the current device, so make it this one
            return _seen_by_device(pinned_zeros(shape, dtype), device)
    except RuntimeError as error:
        size = torch.Size(shape).numel() * dtype.itemsize
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        warnings.warn(
            f"{size:,} bytes of host memory could not be pinned ({reason}): the cache goes on with ordinary memory, and "
            "every fetch waits for the host; raise the limit of locked memory (ulimit -l) or compress a smaller batch",
            stacklevel=2,
        )
        return torch.zeros(shape, dtype=dtype)


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in pinned memory; RuntimeError where the system refuses to pin it."""
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


class _Pinned:
    """Pinned memory behind the CUDA array interface: its address is the same for host and device.

    It lives as long as any tensor made of it. Kernels may still read it when the last such tensor is freed (pages grow, a cache
    is dropped), and torch's allocator only knows of its own copies. So `__del__` copies one byte on every stream that reads
    host memory: the allocator then reuses the memory only after these streams have got that far. The host does not wait.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host, self.device = host, device

    def __del__(self) -> None:
        if torch is None or not torch.cuda.is_initialized():  # at interpreter exit
            return
        byte = self.host.view(-1).view(torch.uint8)[:1]
        for stream in (torch.cuda.current_stream(self.device), SideStream.of(self.device)):
            if stream is not None:
                with torch.cuda.stream(stream):
                    byte.to(self.device, non_blocking=True)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.host.numel() * self.host.element_size(),),
            "typestr": "|u1",
            "data": (self.host.data_ptr(), False),
            "version": 2,
        }


def _seen_by_device(host: Tensor, device: torch.device) -> Tensor:
    seen: Tensor = torch.as_tensor(_Pinned(host, device), device=device)
    # torch copies memory that was pinned for another GPU, because it takes it for that GPU's own.
    if seen.data_ptr() != host.data_ptr():
        raise RuntimeError(f"it was pinned for another GPU than {device}")
    return seen.view(host.dtype).view(host.shape)
