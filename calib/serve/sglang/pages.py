"""Converts between pages in SGLang's host memory and the codec's chunks.

`kv_buffer` of a host pool of plain attention is one tensor of keys, then values, in one of four layouts (`--hicache-mem-layout`; D:
head_dim):

    layer_first         [2, layers, slots, heads, D]
    page_first          [2, slots, layers, heads, D]
    page_first_direct   [2, pages, layers, page, heads, D]
    page_head           [2, pages, heads, page, layers, D]

A page is `page` consecutive slots. Heads are the KV heads of one rank of tensor parallelism.
"""

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class Pages:
    """The pages of one host pool, as the codec's chunks.

    Args:
        pool: SGLang's `MHATokenToKVPoolHost`.
        layers, head_dim: shape of the artifact's model.

    Attributes:
        layout: the pool's layout.
        page: tokens of a page.
        heads: number of KV heads of this rank.
        dtype: dtype of keys and values.

    Raises ValueError unless the pool has keys and values of all `layers`, of `head_dim` channels, in one of `LAYOUTS` and `DTYPES`.
    """

    def __init__(self, pool: Any, layers: int, head_dim: int) -> None:
        self.layout = getattr(pool, "layout", None)
        if not isinstance(getattr(pool, "kv_buffer", None), Tensor):
            raise ValueError(
                f"the host pool is {type(pool).__name__}, expected one tensor of keys and values of equally many channels; serve "
                "such a model with another backend"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"the host pool has layout {self.layout}, expected {', '.join(LAYOUTS)}; start SGLang with "
                "--hicache-mem-layout page_first"
            )
        found = pool.layer_num, pool.head_dim
        if found != (layers, head_dim):
            raise ValueError(
                f"the host pool has {found[0]} layers of {found[1]} channels, expected {layers} of {head_dim}; give this model's "
                "artifact, and serve it without pipeline stages and draft layers"
            )
        if pool.dtype not in DTYPES:
            raise ValueError(
                f"the host pool is {pool.dtype}, expected float32, float16 or bfloat16; give the engine a KV cache of 16 bits"
            )
        self._buffer: Tensor = pool.kv_buffer
        self.page, self.heads, self.dtype = int(pool.page_size), int(pool.head_num), pool.dtype
        self._shape = 2, layers, self.page, self.heads * head_dim

    def read(self, slot: int) -> Tensor:
        """Returns the page that begins at `slot` as a chunk `[2, layers, page, heads * D]`: a copy for `page_head`, else a view."""
        return self._of(slot).reshape(self._shape)

    def write(self, slot: int, chunk: Tensor) -> None:
        """Writes a chunk into the page that begins at `slot`."""
        page = self._of(slot)
        page.copy_(chunk.view(page.shape))

    def _of(self, slot: int) -> Tensor:
        """Returns the page as a view `[2, layers, page, heads, D]` of the pool's memory."""
        if self.layout == "layer_first":
            return self._buffer[:, :, slot : slot + self.page]
        if self.layout == "page_first":
            return self._buffer[:, slot : slot + self.page].transpose(1, 2)
        page = self._buffer[:, slot // self.page]
        return page if self.layout == "page_first_direct" else page.transpose(1, 3)
