"""The table of codecs: one row for each codec and set of options that every law of the codecs runs over.

A new codec is a row here. `bits` is what a value of a 16-bit model takes in the long run, at `CHANNELS` channels and `HEADS` KV
heads; it is written down by hand and not computed, because it is what the codec's documentation promises.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from calib.runtime.stages.codec import (
    Clipped,
    Codebook,
    Codec,
    Direction,
    DualScale,
    Exact,
    MixedQuant,
    ScaledChannels,
    Sized,
    Sparse,
    TokenRange,
    TrellisQuant,
    UniformQuant,
)
from calib.runtime.stages.codec.coefficients import Coefficients
from calib.runtime.stages.shared_table import SharedTable

HEADS, CHANNELS = 2, 16


@dataclass(frozen=True)
class CodecCase:
    """A codec with its options.

    Attributes:
        make: the codec; it may draw tables from its generator.
        bits: of a value.
        channels: the width of what it encodes.
        reach: the largest |x| that it is made for.
    """

    name: str
    make: Callable[[torch.Generator], Codec]
    bits: float
    channels: int = CHANNELS
    reach: float = torch.inf

    def __str__(self) -> str:
        return self.name

    def codec(self) -> Codec:
        """The same each time."""
        return self.make(torch.Generator().manual_seed(7))


def dictionary(draw: torch.Generator) -> SharedTable:
    """32 unit vectors of `CHANNELS` channels."""
    atoms = torch.randn(32, CHANNELS, generator=draw)
    return SharedTable((atoms / atoms.norm(dim=-1, keepdim=True)).half())


def levels(draw: torch.Generator, count: int) -> torch.Tensor:
    """One table of rising levels on [-1, 1]."""
    return 2 * torch.rand(1, count, generator=draw).sort(-1).values - 1


def size_weights(draw: torch.Generator) -> torch.Tensor:
    """One over deviation and root of the number of components; one tells nothing of a token's size."""
    weights = (1 + torch.rand(HEADS, 1, 15, generator=draw)) / 15**0.5
    weights[0, 0, 4] = 0
    return weights


def error_weights(draw: torch.Generator) -> torch.Tensor:
    """What errors of 15 components count."""
    return 0.3 + 0.7 * torch.rand(HEADS, 1, 15, generator=draw)


CODECS = [
    CodecCase("exact", lambda draw: Exact(), 16.0),
    # A scale and a zero point of 16 bits a token: 32/16.
    CodecCase("uniform-2", lambda draw: UniformQuant(2), 4.0),
    CodecCase("uniform-8-groups", lambda draw: UniformQuant(8, (1, 8)), 12.0),
    # 3 bits: 5 codes a word, 4 words for 16 channels. A scale and a zero point for 8 tokens of a channel.
    CodecCase("uniform-3-channels", lambda draw: UniformQuant(3, (8, 1)), 8.0),
    CodecCase("uniform-4-range", lambda draw: UniformQuant(4, None), 4.0),
    CodecCase("uniform-4-heads", lambda draw: UniformQuant(4, (4, None), across_heads=True), 4.25),
    # Of a segment of 64 tokens: 4 + 32/64, and 4 + 32/16 + 16/64.
    CodecCase("uniform-4-segment", lambda draw: UniformQuant(4, (None, 1)), 4.5),
    CodecCase("scaled-channels-4", lambda draw: ScaledChannels(UniformQuant(4)), 6.25),
    CodecCase("scaled-channels-2-heads", lambda draw: ScaledChannels(UniformQuant(2, across_heads=True), "tier"), 3.25),
    # The same of tokens whose 4 largest of 16 channels are cut to the fifth.
    CodecCase("clipped-2", lambda draw: Clipped(UniformQuant(2, (1, 8)), 0.7), 6.0),
    # 3 bits: 4 words for 16 channels, and nothing beside them.
    CodecCase("codebook-3", lambda draw: Codebook.of(torch.randn(9, HEADS, 20, CHANNELS, generator=draw), 3), 4.0),
    # 4 bits, and a norm of 16 bits for 16 channels.
    CodecCase("direction-4", lambda draw: Direction.uniform(CHANNELS, 4), 5.0),
    # Tiles of 8 tokens and 16 channels: 4 + 32/8 + 16/16, 2 + 32/16 + 16/8, and 3 bits as 4 words.
    CodecCase("dual-scale-4-channels", lambda draw: DualScale(4, "channels", 8), 9.0),
    CodecCase("dual-scale-2-tokens", lambda draw: DualScale(2, "tokens", 8), 6.0),
    CodecCase("dual-scale-3-tokens", lambda draw: DualScale(3, "tokens", 8, 0), 8.0),
    # 3 bits: 4 words for 16 channels; a centre and a half range of 16 bits for the 32 channels of both heads.
    CodecCase("token-range-3", lambda draw: TokenRange(Codebook(levels(draw, 8))), 5.0),
    # 3 words of 16 bits for 15 components.
    CodecCase("mixed", lambda draw: MixedQuant((4, 4, 4, 2, 2), (3, 3)), 3.2, 15, reach=1.0),
    # The same, and a byte of sizes for both heads.
    CodecCase(
        "sized",
        lambda draw: Sized(MixedQuant((4, 4, 4, 2, 2), (3, 3)), size_weights(draw)),
        3.2 + 8 / 30,
        15,
        reach=1.0,
    ),
    CodecCase("trellis", lambda draw: TrellisQuant((4, 4, 4, 2, 2), (3, 3), error_weights(draw)), 3.2, 15, reach=1.0),
    CodecCase(
        "trellis-sized",
        lambda draw: Sized(TrellisQuant((4, 4, 4, 2, 2), (3, 3), error_weights(draw)), size_weights(draw)),
        3.2 + 8 / 30,
        15,
        reach=1.0,
    ),
    # 4 indices of 5 bits in bytes (4 + 1: 2 and 1), and 4 numbers of 16 bits.
    CodecCase("sparse", lambda draw: Sparse(4, offline=dictionary(draw)), 5.5),
    CodecCase(
        "sparse-int4",
        lambda draw: Sparse(4, 2, SharedTable(dictionary(draw).tensor[:, :8]), coefficients=Coefficients(4)),
        5.5,
    ),
]
