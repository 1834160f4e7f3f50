"""The bytes after a chunk's header: exact first tokens of a text, then the codes of all tokens, as specified in `codec.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from calib.runtime.paging.field import Block
from calib.runtime.storage.entropy import EntropyCoder
from calib.runtime.storage.header import Header

WORD_BYTES = 2


@dataclass(frozen=True)
class Payload:
    """The parts of a payload, and how many bytes they take.

    Args:
        values: number of key and value elements of a token of a chunk.
        widths: for each layer the number of 16-bit words of a token in each field, in order.
        entropy: the entropy coder; None stores words as they are.
    """

    values: int
    widths: Sequence[dict[str, int]]
    entropy: EntropyCoder | None

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of a token's codes; with an entropy coder the largest number."""
        return WORD_BYTES * sum(sum(own.values()) for own in self.widths)

    def sizes(self, header: Header) -> range:
        """The possible numbers of bytes of a payload with this header."""
        exact, most = self._exact_bytes(header), header.tokens * self.bytes_per_token
        least = most if self.entropy is None else self.entropy.least_bytes(header.tokens)
        return range(exact + least, exact + most + 1)

    def most(self, header: Header) -> int:
        """The largest number of bytes, which is the number without an entropy coder."""
        return self.sizes(header).stop - 1

    def exact(self, data: Tensor, header: Header) -> Tensor:
        """The exact tokens `[2, layers, n, kv_heads * head_dim]`, a view of the bytes `data`; n may be 0."""
        raw = data[: self._exact_bytes(header)].view(header.dtype)
        return raw.view(2, header.layers, header.exact, len(header.heads) * header.head_dim)

    def words(self, data: Tensor, header: Header) -> Tensor:
        """All words int16, a view of the bytes `data` unless they are entropy-coded. Raises BlobError for bytes that are not the
        coder's output."""
        codes = data[self._exact_bytes(header) :]
        if self.entropy is None or len(codes) == header.tokens * self.bytes_per_token:
            return codes.view(torch.int16)
        return self.entropy.words(codes, header.tokens)

    def blocks(self, words: Tensor, tokens: int) -> list[Block]:
        """The fields of each layer, views `[tokens, width]` of `words`."""
        found, at = list[Block](), 0
        for widths in self.widths:
            own = dict[str, Tensor]()
            for name, width in widths.items():
                own[name] = words[at : at + tokens * width].view(tokens, width)
                at += tokens * width
            found.append(own)
        return found

    def shortened(self, data: Tensor, header: Header) -> Tensor:
        """Returns the payload `data`, uint8, with its words entropy-coded, if there is a coder and that is shorter; else `data`."""
        if self.entropy is None:
            return data
        coded = self.entropy.coded(self.blocks(self.words(data, header), header.tokens))
        exact = self._exact_bytes(header)
        return torch.cat([data[:exact], coded]) if exact + len(coded) < len(data) else data

    def _exact_bytes(self, header: Header) -> int:
        return header.exact * self.values * header.dtype.itemsize
