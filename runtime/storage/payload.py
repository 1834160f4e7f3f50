"""What lies behind a chunk's header: the first tokens of a text as they are, then the codes of all tokens, as `codec.py` says."""

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
    """Where its parts are, and how many bytes they take.

    Args:
        values: keys and values of a token of a chunk.
        widths: words of 16 bits of a token by field, layer by layer, in their order.
        entropy: what makes words fewer; None leaves them as they are.
    """

    values: int
    widths: Sequence[dict[str, int]]
    entropy: EntropyCoder | None

    @cached_property
    def bytes_per_token(self) -> int:
        """Of codes; at most, behind an entropy coder."""
        return WORD_BYTES * sum(sum(own.values()) for own in self.widths)

    def sizes(self, header: Header) -> range:
        """How many bytes there may be."""
        exact, most = self._exact_bytes(header), header.tokens * self.bytes_per_token
        least = most if self.entropy is None else self.entropy.least_bytes(header.tokens)
        return range(exact + least, exact + most + 1)

    def most(self, header: Header) -> int:
        """Bytes; there are so many where no entropy coder makes them fewer."""
        return self.sizes(header).stop - 1

    def exact(self, data: Tensor, header: Header) -> Tensor:
        """The first tokens `[2, layers, n, kv_heads * head_dim]`, a view of all bytes; n is 0 where there are none."""
        raw = data[: self._exact_bytes(header)].view(header.dtype)
        return raw.view(2, header.layers, header.exact, len(header.heads) * header.head_dim)

    def words(self, data: Tensor, header: Header) -> Tensor:
        """All words int16, a view of the bytes unless they went through the entropy coder. Raises BlobError for bytes that it did
        not make."""
        codes = data[self._exact_bytes(header) :]
        if self.entropy is None or len(codes) == header.tokens * self.bytes_per_token:
            return codes.view(torch.int16)
        return self.entropy.words(codes, header.tokens)

    def blocks(self, words: Tensor, tokens: int) -> list[Block]:
        """Each layer's fields, views `[tokens, width]` of all words."""
        found, at = list[Block](), 0
        for widths in self.widths:
            own = dict[str, Tensor]()
            for name, width in widths.items():
                own[name] = words[at : at + tokens * width].view(tokens, width)
                at += tokens * width
            found.append(own)
        return found

    def shortened(self, data: Tensor, header: Header) -> Tensor:
        """The same behind the entropy coder, where that is shorter: uint8, as `data` is."""
        if self.entropy is None:
            return data
        coded = self.entropy.coded(self.blocks(self.words(data, header), header.tokens))
        exact = self._exact_bytes(header)
        return torch.cat([data[:exact], coded]) if exact + len(coded) < len(data) else data

    def _exact_bytes(self, header: Header) -> int:
        return header.exact * self.values * header.dtype.itemsize
