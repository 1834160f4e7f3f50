"""One layer's pages as tensors: what lies on the page numbers that a table gives out."""

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

# Zeros of a shape and dtype for a device: where a pool's pages live.
Memory: TypeAlias = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]

_TOKENS_LAST = (1, 3, 0, 2)  # of `[pages, kv_heads, rows, width]`


def device_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device itself."""
    return torch.zeros(shape, dtype=dtype, device=device)


class PagePool:
    """One layer's pages: for each field of a stream a tensor `[pages, kv_heads, page_tokens / tokens_per_row, width]`, where
    heads share it `[pages, 1, ...]`. What a whole segment shares is one row of its page: a page is then no more than a segment.
    Where `memory` gives tensors of another device, what is read comes to the pool's own. `derived` is made anew when pages move.
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
        """Makes room for the same fields with wider rows or larger indices; what is there stays, followed by zeros."""
        for name, field in fields.items():
            if field == self.fields.get(name):
                continue
            new = self._zeros(field, self.capacity, self.page_tokens)
            if name in self.tensors and self.capacity:
                old = self.tensors[name]
                # Indices in 16 bits have no sign.
                old = old.int() & 0xFFFF if (old.dtype, field.dtype) == (torch.int16, torch.int32) else old
                new[..., : old.shape[-1]] = old
            self.tensors[name] = new
        self.fields = fields
        self._forget()

    def _zeros(self, field: Field, pages: int, page_tokens: int) -> Tensor:
        """`[pages, kv_heads or 1, rows, width]`, in the order in memory in which it is read: kernels read a page as it lies; plain
        torch reads a channel of all tokens (an exact token: all its channels), and pages that follow each other without a copy."""
        heads = 1 if field.shared else self.kv_heads
        shape = (pages, heads, page_tokens // (field.tokens_per_row or page_tokens), field.width)
        if not self._reads_views:
            return self.memory(shape, field.dtype, self.device)
        order = (1, 0, 2, 3) if field.kind == "exact" else _TOKENS_LAST
        laid_out = self.memory(tuple(shape[axis] for axis in order), field.dtype, self.device)
        return laid_out.permute([order.index(axis) for axis in range(4)])

    def _lies_as_read(self) -> bool:
        """Whether pages lie in the order in which plain torch reads them."""
        return self.memory is device_memory and not prefers_triton(self.device)

    def _forget(self) -> None:
        """The tensors are others."""
        self._tiles.clear()
        self.derived.clear()

    def rows_of(self, field: Field) -> int:
        """Tokens of a row of `field`."""
        return field.tokens_per_row or self.page_tokens

    def grow(self, capacity: int, page_tokens: int | None = None) -> None:
        """Makes room for `capacity` pages, each of `page_tokens` slots where that is given. New slots are zero: one that nobody
        wrote must still be finite."""
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
        """Moves every page."""
        self.device = device
        self._reads_views = self._lies_as_read()
        for name, tensor in self.tensors.items():
            self.tensors[name] = self._zeros(self.fields[name], self.capacity, self.page_tokens).copy_(tensor)
        self._forget()

    def bytes_by_kind(self, capacity: int) -> Counter[str]:
        """Bytes of so many pages, from shapes."""
        found: Counter[str] = Counter()
        for field in self.fields.values():
            found[field.kind] += capacity * (self.page_tokens // self.rows_of(field)) * field.row_bytes(self.kv_heads)
        return found

    def bytes_per_token(self) -> float:
        """Bytes of one more token, for all KV heads."""
        return sum(field.bytes_per_token(self.kv_heads, self.page_tokens) for field in self.fields.values())

    def bits_per_value(self, width: int, part: str = "") -> float:
        """Bits of one of a token's `width` values of each KV head, of the fields of a `part` ("keys.")."""
        own = [field for name, field in self.fields.items() if name.startswith(part)]
        return (
            8 * sum(field.bytes_per_token(self.kv_heads, self.page_tokens) for field in own) / (self.kv_heads * width)
        )

    def state(self) -> State:
        """Every page of every field."""
        return dict(self.tensors)

    def restore(self, state: State, capacity: int, page_tokens: int | None = None) -> None:
        """The pages of a state, of which there are `capacity`, as `grow` takes them; the fields must be laid out as they were."""
        if state.keys() != self.fields.keys():
            raise StateError(f"pages of {printable(sorted(state))}, expected {printable(sorted(self.fields))}")
        if not capacity:
            self.grow(0, page_tokens)
            return
        slots = page_tokens or self.page_tokens
        found = {}
        for name, field in self.fields.items():
            _, heads, _, width = self.tensors[name].shape
            shape = (capacity, heads, slots // (field.tokens_per_row or slots), width)
            found[name] = fitting(state, name, field.dtype, shape)
        if self.device.type == "meta":  # shapes alone are tried
            return
        self.grow(capacity, page_tokens)
        for name, tensor in self.tensors.items():
            values = self.fields[name].values
            wrong = None if values is None else values.wrong(found[name])
            if wrong is not None:
                raise StateError(f"{name!r} {wrong}")
            tensor.copy_(found[name])

    def keep(self, pages: list[int]) -> None:
        """Keeps these pages alone, in this order."""
        for name, tensor in self.tensors.items():
            kept = self._zeros(self.fields[name], len(pages), self.page_tokens)
            self.tensors[name] = kept.copy_(tensor[upload(pages, torch.int64, tensor.device)])
        self.capacity = len(pages)
        self._forget()

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole pages, (from, to) each."""
        for tensor in self.tensors.values():
            for source, target in pairs:
                tensor[target] = tensor[source]

    def read(self, pages: Pages, part: str = "") -> Block:
        """Pages by number -> tile of fields `[rows, kv_heads, width, n * page_tokens / tokens_per_row]`, still packed.

        `pages` is int32 `[rows, n]`, or for one row whose pages follow each other their slice, which saves a copy. Of a
        pool that holds several parts ("keys.words") only the fields of `part` ("keys.") are read, under their own names.
        """
        if not isinstance(pages, slice) or not self._reads_views:
            return self._read(pages, part)
        # Views, which stay what they are until the pages move.
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
                # Nothing to unpack, so the product may as well read tokens first: a token's channels are copied as one run.
                tile[name] = _by_head(tensor, pages).flatten(2, 3).mT
            else:
                tile[name] = _tokens_last(tensor, pages)
        if self.memory is not device_memory:
            tile = {name: part if part.device == self.device else part.to(self.device) for name, part in tile.items()}
        return tile

    def first_rows(self, pages: Pages, part: str) -> Block:
        """As `read`, of pages that are one for each row, of one row of each field: a field is read when it is asked for, and where
        pages are a slice not copied."""
        return FirstRows(
            {name.removeprefix(part): held for name, held in self.tensors.items() if name.startswith(part)}, pages
        )

    def write_runs(self, runs: TokenRuns, block: Block) -> None:
        """Writes consecutive tokens of several rows; `block` fields are `[rows, kv_heads, tokens / tokens_per_row, width or less]`,
        others than the pool's are left alone."""
        puts: list[Put] = []
        for name, field in self.fields.items():
            target = self.tensors[name]
            # Exact tokens come in float32, indices in int32.
            source, missing = _there(block[name], target).to(target.dtype), target.shape[-1] - block[name].shape[-1]
            if missing > 0:  # a segment that is not the longest
                source = F.pad(source, (0, missing))
            puts += runs.puts(target, source, self.rows_of(field))
        put_tokens(puts)

    def write_tokens(self, pages: Tensor, slots: Tensor, block: Block) -> None:
        """Writes one token for each of n rows; see `puts`."""
        put_tokens(self.puts(pages, slots, block))

    def puts(self, pages: Tensor, slots: Tensor, block: Block) -> list[Put]:
        """Where one token for each of n rows goes: page number and slot int64 `[n]`, fields `[n, kv_heads, 1, width]`.

        Slots that differ by head, and their pages, are int64 `[n, kv_heads]`.
        """
        if self.memory is not device_memory:
            like = next(iter(self.tensors.values()))
            pages, slots = _there(pages, like), _there(slots, like)
            block = {name: _there(part, like) for name, part in block.items()}
        found = []
        for name, tensor in self.tensors.items():
            part = block[name]
            # Mostly of its field's type already: a conversion that changes nothing takes the host as long as one that does.
            found.append(Put(tensor, part if part.dtype == tensor.dtype else part.to(tensor.dtype), slots, pages=pages))
        return found

    def read_tokens(self, pages: Tensor, slots: Tensor) -> Block:
        """One token for each of n rows and each head: page number and slot int64 `[n, kv_heads]` -> `[n, kv_heads, 1, width]`."""
        heads = torch.arange(self.kv_heads, device=slots.device)
        return {name: tensor[pages, heads, slots][:, :, None] for name, tensor in self.tensors.items()}


class FirstRows(Mapping[str, Tensor]):
    """Fields of one page for each row, `[rows, kv_heads, width, 1]`."""

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
    # By the axis that lies outermost: the other way round the whole pool would be copied to be indexed.
    if tensor.stride(1) > tensor.stride(0):
        lying, index = tensor.transpose(0, 1), of_heads * count + numbers
    else:
        lying, index = tensor, numbers * heads + of_heads
    return lying.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)


def _there(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` where `like` is: pages may lie elsewhere than attention runs."""
    return tensor if tensor.device == like.device else tensor.to(like.device)
