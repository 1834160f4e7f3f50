"""One layer's pages as tensors, indexed by the page numbers of a page table."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.put_tokens.operation import Put, put_tokens
from calib.kernels.upload import upload
from calib.runtime.files.state import State, StateError, fitting
from calib.runtime.messages.printable import printable
from calib.runtime.paging.derived import Derived
from calib.runtime.paging.field import Block, Field
from calib.runtime.paging.page_numbers import PAGE_TOKENS, Pages
from calib.runtime.paging.token_runs import TokenRuns

# (shape, dtype, device) -> zeros: allocates a pool's pages.
Memory: TypeAlias = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]

_TOKENS_LAST = (1, 3, 0, 2)  # of `[pages, kv_heads, rows, width]`


def device_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros on the device itself."""
    return torch.zeros(shape, dtype=dtype, device=device)


class PagePool:
    """One layer's pages: for each field a tensor `[pages, kv_heads, page_tokens / tokens_per_row, width]`, or `[pages, 1, ...]`
    where all heads share it. A field that a whole segment shares has one row a page; such a page holds at most one segment.

    Where `memory` allocates on another device, such as the host, `read` copies to the pool's own device. `derived` caches what
    is computed from the tensors, until they are replaced.
    """

    def __init__(
        self,
        fields: dict[str, Field],
        kv_heads: int,
        device: torch.device,
        page_tokens: int = PAGE_TOKENS,
        memory: Memory = device_memory,
    ) -> None:
        self.page_tokens, self.kv_heads, self.device, self.memory = page_tokens, kv_heads, device, memory
        self.capacity = 0
        self.fields: dict[str, Field] = {}
        self.tensors: dict[str, Tensor] = {}
        self._tiles: dict[tuple[str, int], tuple[int, Block]] = {}
        self.derived = Derived()
        self._reads_views = self._lies_as_read()
        self.fit(fields)

    def fit(self, fields: dict[str, Field]) -> None:
        """Replaces fields by the same ones with wider rows or larger indices; stored content is kept and padded with zeros."""
        for name, field in fields.items():
            if field == self.fields.get(name):
                continue
            new = self._zeros(field, self.capacity, self.page_tokens)
            if name in self.tensors and self.capacity:
                old = self.tensors[name]
                # int16 indices are unsigned.
                old = old.int() & 0xFFFF if (old.dtype, field.dtype) == (torch.int16, torch.int32) else old
                new[..., : old.shape[-1]] = old
            self.tensors[name] = new
        self.fields = fields
        self._forget()

    def _zeros(self, field: Field, pages: int, page_tokens: int) -> Tensor:
        """Zeros `[pages, kv_heads or 1, rows, width]`, with the memory order in which they are read. Kernels read a page as it
        is stored. Plain torch reads one channel of all tokens (of exact tokens all channels), and consecutive pages without a
        copy."""
        heads = 1 if field.shared else self.kv_heads
        shape = (pages, heads, page_tokens // (field.tokens_per_row or page_tokens), field.width)
        if not self._reads_views:
            return self.memory(shape, field.dtype, self.device)
        order = (1, 0, 2, 3) if field.kind == "exact" else _TOKENS_LAST
        laid_out = self.memory(tuple(shape[axis] for axis in order), field.dtype, self.device)
        return laid_out.permute([order.index(axis) for axis in range(4)])

    def _lies_as_read(self) -> bool:
        """Whether the memory order is that in which plain torch reads."""
        return self.memory is device_memory and not prefers_triton(self.device)

    def _forget(self) -> None:
        """Drops cached views, because the tensors were replaced."""
        self._tiles.clear()
        self.derived.clear()

    def rows_of(self, field: Field) -> int:
        """How many tokens one row of `field` covers."""
        return field.tokens_per_row or self.page_tokens

    def grow(self, capacity: int, page_tokens: int | None = None) -> None:
        """Makes room for `capacity` pages, of `page_tokens` slots if given. New slots are zero, because even slots that are
        never written must be finite."""
        slots = page_tokens or self.page_tokens
        if (capacity, slots) == (self.capacity, self.page_tokens):
            return
        for name, old in self.tensors.items():
            new = self._zeros(self.fields[name], capacity, slots)
            if self.capacity:
                new[: self.capacity, :, : old.shape[2]] = old
            self.tensors[name] = new
        self.capacity, self.page_tokens = capacity, slots
        self._forget()

    def to(self, device: torch.device) -> None:
        """Moves every page to `device`."""
        self.device = device
        self._reads_views = self._lies_as_read()
        for name, tensor in self.tensors.items():
            self.tensors[name] = self._zeros(self.fields[name], self.capacity, self.page_tokens).copy_(tensor)
        self._forget()

    def bytes_by_kind(self, capacity: int) -> Counter[str]:
        """Bytes of `capacity` pages by kind, computed from shapes."""
        found: Counter[str] = Counter()
        for field in self.fields.values():
            found[field.kind] += capacity * (self.page_tokens // self.rows_of(field)) * field.row_bytes(self.kv_heads)
        return found

    def bytes_per_token(self) -> float:
        """Bytes of one more token, for all KV heads."""
        return sum(field.bytes_per_token(self.kv_heads, self.page_tokens) for field in self.fields.values())

    def bits_per_value(self, width: int, part: str = "") -> float:
        """Bits of each of the `width` elements that a token has in every KV head, in the fields whose names begin with `part`."""
        own = [field for name, field in self.fields.items() if name.startswith(part)]
        return (
            8 * sum(field.bytes_per_token(self.kv_heads, self.page_tokens) for field in own) / (self.kv_heads * width)
        )

    def state(self) -> State:
        """The tensors of all fields."""
        return dict(self.tensors)

    def restore(self, state: State, capacity: int, page_tokens: int | None = None) -> None:
        """Fills the pool from `state`, which has `capacity` pages of `page_tokens` slots. Raises StateError for other fields or
        shapes."""
        if state.keys() != self.fields.keys():
            raise StateError(
                f"pages have the fields {printable(sorted(state))}, expected {printable(sorted(self.fields))}"
            )
        if not capacity:
            self.grow(0, page_tokens)
            return
        slots = page_tokens or self.page_tokens
        found = {}
        for name, field in self.fields.items():
            _, heads, _, width = self.tensors[name].shape
            shape = (capacity, heads, slots // (field.tokens_per_row or slots), width)
            found[name] = fitting(state, name, field.dtype, shape)
        if self.device.type == "meta":  # only shapes are checked
            return
        self.grow(capacity, page_tokens)
        for name, tensor in self.tensors.items():
            values = self.fields[name].values
            wrong = None if values is None else values.wrong(found[name])
            if wrong is not None:
                raise StateError(f"{name!r} {wrong}")
            tensor.copy_(found[name])

    def keep(self, pages: list[int]) -> None:
        """Keeps only these pages, in this order."""
        for name, tensor in self.tensors.items():
            kept = self._zeros(self.fields[name], len(pages), self.page_tokens)
            self.tensors[name] = kept.copy_(tensor[upload(pages, torch.int64, tensor.device)])
        self.capacity = len(pages)
        self._forget()

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole pages; `pairs` are (from, to) page numbers."""
        for tensor in self.tensors.values():
            for source, target in pairs:
                tensor[target] = tensor[source]

    def read(self, pages: Pages, part: str = "") -> Block:
        """Returns pages, still packed, as fields `[rows, kv_heads, width, n * page_tokens / tokens_per_row]`.

        `pages` is int32 `[rows, n]`, or a slice for one row whose page numbers are consecutive, which saves a copy. In a pool
        with several parts ("keys.words") only the fields of `part` ("keys.") are read, under their names without the prefix.
        """
        if not isinstance(pages, slice) or not self._reads_views:
            return self._read(pages, part)
        # Views, which stay valid until the tensors are replaced.
        key = (part, pages.start)
        stop, tile = self._tiles.get(key, (None, {}))
        if stop != pages.stop:
            tile = self._read(pages, part)
            self._tiles[key] = pages.stop, tile
        return tile

    def _read(self, pages: Pages, part: str) -> Block:
        tile = {}
        if not isinstance(pages, slice) and self.memory is not device_memory:
            pages = _there(pages, next(iter(self.tensors.values())))
        for full_name, tensor in self.tensors.items():
            if not full_name.startswith(part):
                continue
            name = full_name.removeprefix(part)
            if self.fields[full_name].kind == "exact":
                # Exact tokens need no unpacking, so tokens come first in memory: a token's channels are copied as one run.
                tile[name] = _by_head(tensor, pages).flatten(2, 3).mT
            else:
                tile[name] = _tokens_last(tensor, pages)
        if self.memory is not device_memory:
            tile = {name: part if part.device == self.device else part.to(self.device) for name, part in tile.items()}
        return tile

    def of_row(self, pages: list[int], count: int) -> dict[str, Tensor]:
        """The first `count` tokens in one row's `pages`, as fields `[1, kv_heads, count / tokens_per_row (rounded up), width]` on
        the device of the pages."""
        return {
            name: tensor[pages].transpose(0, 1).flatten(1, 2)[None, :, : -(-count // self.rows_of(self.fields[name]))]
            for name, tensor in self.tensors.items()
        }

    def first_rows(self, pages: Pages, part: str) -> Block:
        """Like `read`, for one page of each row and the first row of each field in it. A field is read when it is first
        accessed, and not copied where `pages` is a slice."""
        return FirstRows(
            {name.removeprefix(part): held for name, held in self.tensors.items() if name.startswith(part)}, pages
        )

    def write_runs(self, runs: TokenRuns, block: Block) -> None:
        """Writes consecutive tokens of several rows. The fields of `block` are
        `[rows, kv_heads, tokens / tokens_per_row, width or less]`; fields that the pool does not have are ignored."""
        puts: list[Put] = []
        for name, field in self.fields.items():
            target = self.tensors[name]
            # Exact tokens arrive in float32, indices in int32.
            source, missing = _there(block[name], target).to(target.dtype), target.shape[-1] - block[name].shape[-1]
            if missing > 0:  # a segment shorter than the longest
                source = F.pad(source, (0, missing))
            puts += runs.puts(target, source, self.rows_of(field))
        put_tokens(puts)

    def write_tokens(self, pages: Tensor, slots: Tensor, block: Block) -> None:
        """Writes one token for each of n rows; arguments as in `puts`."""
        put_tokens(self.puts(pages, slots, block))

    def puts(self, pages: Tensor, slots: Tensor, block: Block) -> list[Put]:
        """Returns the writes of one token for each of n rows: page numbers and slots int64 `[n]`, fields
        `[n, kv_heads, 1, width]`.

        Where slots and pages differ by head, both are int64 `[n, kv_heads]`.
        """
        if self.memory is not device_memory:
            like = next(iter(self.tensors.values()))
            pages, slots = _there(pages, like), _there(slots, like)
            block = {name: _there(part, like) for name, part in block.items()}
        found = []
        for name, tensor in self.tensors.items():
            part = block[name]
            # Mostly of the field's dtype already; even a conversion that changes nothing costs host time.
            found.append(Put(tensor, part if part.dtype == tensor.dtype else part.to(tensor.dtype), slots, pages=pages))
        return found

    def read_tokens(self, pages: Tensor, slots: Tensor) -> Block:
        """One token for each of n rows and each head: page number and slot int64 `[n, kv_heads]` -> `[n, kv_heads, 1, width]`."""
        heads = torch.arange(self.kv_heads, device=slots.device)
        return {name: tensor[pages, heads, slots][:, :, None] for name, tensor in self.tensors.items()}


class FirstRows(Mapping[str, Tensor]):
    """The first row of each field in one page per batch row, `[rows, kv_heads, width, 1]`; read at the first access."""

    def __init__(self, tensors: dict[str, Tensor], pages: Pages) -> None:
        self.tensors, self.pages = tensors, pages
        self.found: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.found:
            tensor, sliced = self.tensors[name], isinstance(self.pages, slice)
            self.found[name] = tensor[self.pages].mT if sliced else _tokens_last(tensor, self.pages)
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _tokens_last(tensor: Tensor, pages: Pages) -> Tensor:
    """The `pages` of a field `[pages, kv_heads, slots, w]` as `[rows, kv_heads, w, n * slots]`."""
    across = tensor.permute(_TOKENS_LAST)
    if isinstance(pages, slice):
        return across[:, :, pages].flatten(2)[None]
    found = across.index_select(2, pages.flatten()).unflatten(2, pages.shape)
    return found.movedim(2, 0).flatten(3).contiguous()


def _by_head(tensor: Tensor, pages: Pages) -> Tensor:
    """The `pages` of a field `[pages, kv_heads, slots, w]` as `[rows, kv_heads, n, slots, w]`, copied once at most."""
    if isinstance(pages, slice):
        return tensor[pages].transpose(0, 1)[None]
    (count, heads), numbers = tensor.shape[:2], pages[:, None]
    of_heads = torch.arange(heads, device=pages.device, dtype=pages.dtype)[:, None]
    # Index along the axis that is outermost in memory; otherwise flatten would copy the whole pool.
    if tensor.stride(1) > tensor.stride(0):
        lying, index = tensor.transpose(0, 1), of_heads * count + numbers
    else:
        lying, index = tensor, numbers * heads + of_heads
    return lying.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)


def _there(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` on the device of `like`: pages may be on another device than attention."""
    return tensor if tensor.device == like.device else tensor.to(like.device)
