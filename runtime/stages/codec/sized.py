"""A size for every token: its components are divided by the size before they are coded.

Tokens of one head differ in length far more than their components do in distribution, so one step for all is too wide for most and
too narrow for some. The size s is the root mean square of a token's components in units of their calibrated deviations, rounded
to half an octave:

    s = 2^((i - 5) / 2), i = 0 ... 15        y^ = s D(E(y / s))

i has four bits for each token, KV head and stream: four heads share a 16-bit word, one or two heads a byte. In attention the size
is a factor on logits (keys) and on weights (values). (TurboQuant and others keep a norm of 16 bits.)
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from calib.kernels.attend.operation import SIZE_BITS, SIZE_OF_ONE, PackedStream
from calib.kernels.components.operation import supported
from calib.kernels.components.projection import Projection
from calib.kernels.pack.reference import pack_away, unpack, unpack_columns, words_per_token
from calib.kernels.upload import upload
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.codec.direction import norm
from calib.runtime.stages.codec.mixed import MixedQuant
from calib.runtime.stages.codec.trellis import TrellisQuant
from calib.runtime.stages.contract import Codec, Segment

PER_OCTAVE = 2


@dataclass(frozen=True, eq=False)
class Sized(Codec):
    """`codec` of y / s.

    Args:
        codec: of components in units of their ranges, which were measured on components divided by their token's size.
        weights: float32 `[kv_heads, 1, components]`: 1 / (deviation x root of the number of components), with which the norm of a
            token's weighted components is their root mean square; 0 for a component for which its head has no word.
        whole_words: whether sizes are stored in 16-bit words even if a byte is enough, as stored chunks need (`runtime/storage`).
    """

    codec: MixedQuant | TrellisQuant
    weights: Tensor
    whole_words: bool = False

    onnx_writer = "sized words"

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return len(self.codec.counts)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored sizes."""
        return size_dtype(self.heads, self.whole_words)

    @property
    def has_kernel(self) -> bool:
        """As for `codec`."""
        return self.codec.has_kernel

    @property
    def component_codes(self) -> "Sized":
        """Itself: a token's numbers are its codes times its size, and then the size, which multiplies the offset of all codes."""
        return self

    @property
    def piece(self) -> int:
        """As for `codec`."""
        return self.codec.piece

    def token_group(self) -> int:
        """1: tokens are encoded independently."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The codec's words, and the sizes of all heads."""
        sizes = Field(1, size_words(self.heads), self.dtype, "parameters", shared=True)
        return self.codec.fields(head_dim, dtype, fp32_params, segment) | {"sizes": sizes}

    def fp32_params(self, x: Tensor) -> bool:
        """False: a size is stored as a number of four bits."""
        return False

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """y `[batch, kv_heads, tokens, components]` -> words, and sizes `[batch, 1, tokens, W]`."""
        number = self.numbers(x)
        return self._beside(self.codec.encode(x / size_of(number)), number.squeeze(-1))

    def encode_projected(self, x: Tensor, projection: Projection) -> Block | None:
        """Encodes with a kernel that computes components and sizes; None if none supports them."""
        if not supported(x, self.codec.counts):
            return None
        block, number = self.codec.projected(x, projection, self.weights)
        assert number is not None
        return self._beside(block, number)

    def _beside(self, block: Block, number: Tensor) -> Block:
        """The block with packed sizes added, whose numbers i are `number [batch, kv_heads, tokens]`."""
        packed = pack_away(number.mT.to(torch.int16, copy=True), SIZE_BITS)
        return {**block, "sizes": packed.to(self.dtype).unsqueeze(1)}

    def numbers(self, x: Tensor) -> Tensor:
        """The numbers i of the sizes of tokens y `[..., kv_heads, tokens, components]`: int64 `[..., kv_heads, tokens, 1]`."""
        return size_number(norm(x * self.weights))

    def decode(self, block: Block, channels: int) -> Tensor:
        """y^ float32 `[..., kv_heads, tokens, components]`."""
        number = unpack(block["sizes"].squeeze(-3), SIZE_BITS, self.heads)
        return self.codec.decode(block, channels) * size_of(number.mT).unsqueeze(-1)

    def error_bound(self, x: Tensor) -> Tensor:
        """The codec's of y / s, times s."""
        size = size_of(self.numbers(x))
        return self.codec.error_bound(x / size) * size

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """`query [..., kv_heads, rows, components]` float32 -> logits: the codec's times the tokens' sizes."""
        return self.codec.scores(query, tile) * self.sizes(tile)

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Sums of the components weighted by `weights [..., kv_heads, rows, tokens]` float32 times sizes."""
        return self.codec.mix(weights * self.sizes(tile), tile, channels)

    def rotated_scores(self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As in `ComponentCodes`: keys are `matrix [kv_heads, D, components + 2]` times s c, s and 1, for size s and codes c."""
        return self.codec.rotated_scores(query, tile, matrix, cos, sin, self.sizes(tile))

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """Sums of s c and s by `weights [..., kv_heads, rows, tokens]` float32: `[..., kv_heads, rows, components + 1]`."""
        sized = weights * self.sizes(tile)
        return torch.cat([self.codec.mixed_codes(sized, tile), sized.sum(-1, keepdim=True)], -1)

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream | None:
        """The codec's words, and sizes; None where no kernel reads the words."""
        stream = self.codec.packed(pages, channels, shared)
        return None if stream is None else replace(stream, sizes=pages["sizes"])

    def sizes(self, tile: Block) -> Tensor:
        """s of a tile's tokens: float32 `[..., kv_heads, 1, tokens]`."""
        number = unpack_columns(tile["sizes"].squeeze(-3), SIZE_BITS, self.heads)
        return size_of(number).unsqueeze(-2)


def size_words(heads: int) -> int:
    """Number of words for a token's sizes of so many KV heads in one stream: words of 16 bits, or one byte (`size_dtype`)."""
    return words_per_token(heads, SIZE_BITS)


def size_dtype(heads: int, whole_words: bool) -> torch.dtype:
    """The dtype of these words: uint8 if 8 bits are enough and `whole_words` is False, else int16."""
    return torch.int16 if whole_words or heads * SIZE_BITS > 8 else torch.uint8


def size_bytes(heads: int, whole_words: bool = False) -> int:
    """Bytes of a token's sizes of so many KV heads in one stream."""
    return size_words(heads) * size_dtype(heads, whole_words).itemsize


def size_number(root_mean_square: Tensor) -> Tensor:
    """The number i of the nearest size: int64 of the given shape. Only compares, so that every device has the same result."""
    return torch.bucketize(root_mean_square, size_edges(root_mean_square.device))


def size_of(number: Tensor) -> Tensor:
    """The size s of each number i, float32."""
    return _sizes(number.device)[number.int()]


def sized(root_mean_square: Tensor) -> Tensor:
    """The nearest size, float32."""
    return size_of(size_number(root_mean_square.float()))


@lru_cache
def _sizes(device: torch.device) -> Tensor:
    numbers = range(1 << SIZE_BITS)
    return upload([2.0 ** ((number - SIZE_OF_ONE) / PER_OCTAVE) for number in numbers], torch.float32, device)


@lru_cache
def size_edges(device: torch.device) -> Tensor:
    """The bounds between neighbouring sizes, which are their geometric means: float32 `[15]`."""
    numbers = range((1 << SIZE_BITS) - 1)
    return upload([2.0 ** ((number + 0.5 - SIZE_OF_ONE) / PER_OCTAVE) for number in numbers], torch.float32, device)
