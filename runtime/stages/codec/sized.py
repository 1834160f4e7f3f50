"""A size for every token: components over the token's own size, and then the codec of components.

Tokens of one head differ in length far more than their components do in shape, so one step for all is too wide for most and too
narrow for some. The size s is the root mean square of a token's components in units of their calibrated deviations, rounded to
half an octave:

    s = 2^((i - 5) / 2), i = 0 ... 15        y^ = s D(E(y / s))

Four bits for each token, KV head and stream, four heads to a word of 16 bits; of one or two heads, in a byte. In attention it is a
factor on scores and on weights. (TurboQuant and others keep a norm of 16 bits.)
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
        codec: of components in units of their ranges, which are those of sized tokens.
        weights: float32 `[kv_heads, 1, components]`: what makes the root mean square of a token's components their norm, one over
            deviation and root of how many there are; 0 for a component that its head has no word for.
        whole_words: whether sizes fill words of 16 bits, where a byte holds them too: stored chunks are of such words.
    """

    codec: MixedQuant | TrellisQuant
    weights: Tensor
    whole_words: bool = False

    onnx_writer = "sized words"

    @property
    def heads(self) -> int:
        """How many KV heads have sizes."""
        return len(self.codec.counts)

    @property
    def dtype(self) -> torch.dtype:
        """Of sizes as they are stored."""
        return size_dtype(self.heads, self.whole_words)

    @property
    def has_kernel(self) -> bool:
        """The codec's."""
        return self.codec.has_kernel

    @property
    def component_codes(self) -> "Sized":
        """Itself: codes times sizes, and behind them the size, which an offset of all codes is multiplied by."""
        return self

    @property
    def piece(self) -> int:
        """The codec's."""
        return self.codec.piece

    def token_group(self) -> int:
        """Every token stands alone."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The codec's words, and the sizes of all heads."""
        sizes = Field(1, size_words(self.heads), self.dtype, "parameters", shared=True)
        return self.codec.fields(head_dim, dtype, fp32_params, segment) | {"sizes": sizes}

    def fp32_params(self, x: Tensor) -> bool:
        """No: a size is a number of four bits."""
        return False

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """y `[batch, kv_heads, tokens, components]` -> words, and sizes `[batch, 1, tokens, W]`."""
        number = self.numbers(x)
        return self._beside(self.codec.encode(x / size_of(number)), number.squeeze(-1))

    def encode_projected(self, x: Tensor, projection: Projection) -> Block | None:
        """By a kernel that makes components and finds sizes, where one does."""
        if not supported(x, self.codec.counts):
            return None
        block, number = self.codec.projected(x, projection, self.weights)
        assert number is not None
        return self._beside(block, number)

    def _beside(self, block: Block, number: Tensor) -> Block:
        """A block of words, and the sizes of these numbers `[batch, kv_heads, tokens]`."""
        packed = pack_away(number.mT.to(torch.int16, copy=True), SIZE_BITS)
        return {**block, "sizes": packed.to(self.dtype).unsqueeze(1)}

    def numbers(self, x: Tensor) -> Tensor:
        """The numbers of the sizes of y `[..., kv_heads, tokens, components]`: int64 `[..., kv_heads, tokens, 1]`."""
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
        """`weights [..., kv_heads, rows, tokens]` float32 and sizes, times the components."""
        return self.codec.mix(weights * self.sizes(tile), tile, channels)

    def turned_scores(self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys are `matrix [kv_heads, D, components + 2]` times s c, s and 1."""
        return self.codec.turned_scores(query, tile, matrix, cos, sin, self.sizes(tile))

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 times s c and s: `[..., kv_heads, rows, components + 1]`."""
        sized = weights * self.sizes(tile)
        return torch.cat([self.codec.mixed_codes(sized, tile), sized.sum(-1, keepdim=True)], -1)

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream | None:
        """The codec's words, and sizes; None where no kernel reads these."""
        stream = self.codec.packed(pages, channels, shared)
        return None if stream is None else replace(stream, sizes=pages["sizes"])

    def sizes(self, tile: Block) -> Tensor:
        """s of a tile's tokens: float32 `[..., kv_heads, 1, tokens]`."""
        number = unpack_columns(tile["sizes"].squeeze(-3), SIZE_BITS, self.heads)
        return size_of(number).unsqueeze(-2)


def size_words(heads: int) -> int:
    """Words that hold a token's sizes of so many KV heads in one stream: of 16 bits, or one byte (`size_dtype`)."""
    return words_per_token(heads, SIZE_BITS)


def size_dtype(heads: int, whole_words: bool = False) -> torch.dtype:
    """Of these words."""
    return torch.int16 if whole_words or heads * SIZE_BITS > 8 else torch.uint8


def size_bytes(heads: int, whole_words: bool = False) -> int:
    """What they take together."""
    return size_words(heads) * size_dtype(heads, whole_words).itemsize


def size_number(root_mean_square: Tensor) -> Tensor:
    """i of the nearest size: int64 of the shape given. By comparison, which every device does alike."""
    return torch.bucketize(root_mean_square, size_edges(root_mean_square.device))


def size_of(number: Tensor) -> Tensor:
    """s of its number, float32."""
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
    """Where the nearest of two neighbours changes, by their ratio: float32 `[15]`."""
    numbers = range((1 << SIZE_BITS) - 1)
    return upload([2.0 ** ((number + 0.5 - SIZE_OF_ONE) / PER_OCTAVE) for number in numbers], torch.float32, device)
