"""The table of codecs: one row for each codec and set of options; every law in `tests/laws/test_every_codec.py` runs over all rows.

Add a row for a new codec. `bits` are the stored bits per value of a 16-bit model, with `CHANNELS` channels, `HEADS` KV heads and a
segment of 64 tokens. The number is worked out by hand from the codec's documentation, so that tests compare the code with it.
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
        make: returns the codec; it may draw random tables from the generator that it gets.
        bits: stored bits per value.
        channels: channels (or components) of the tokens that it encodes.
        reach: the largest |x| for which the codec is made; tests draw no larger values.
    """

    name: str
    make: Callable[[torch.Generator], Codec]
    bits: float
    channels: int = CHANNELS
    reach: float = torch.inf

    def __str__(self) -> str:
        return self.name

    def codec(self) -> Codec:
        """The codec, with the same tables at every call."""
        return self.make(torch.Generator().manual_seed(7))


def dictionary(draw: torch.Generator) -> SharedTable:
    """32 random atoms of norm 1, float16 `[32, CHANNELS]`."""
    atoms = torch.randn(32, CHANNELS, generator=draw)
    return SharedTable((atoms / atoms.norm(dim=-1, keepdim=True)).half())


def levels(draw: torch.Generator, count: int) -> torch.Tensor:
    """One random table of rising levels on [-1, 1], float32 `[1, count]`."""
    return 2 * torch.rand(1, count, generator=draw).sort(-1).values - 1


def size_weights(draw: torch.Generator) -> torch.Tensor:
    """Random weights of the kind of `Sized.weights`, float32 `[HEADS, 1, 15]`; one of them is 0."""
    weights = (1 + torch.rand(HEADS, 1, 15, generator=draw)) / 15**0.5
    weights[0, 0, 4] = 0
    return weights


def error_weights(draw: torch.Generator) -> torch.Tensor:
    """Random weights of the errors of 15 components (`TrellisQuant`), float32 `[HEADS, 1, 15]`."""
    return 0.3 + 0.7 * torch.rand(HEADS, 1, 15, generator=draw)


CODECS = [
    CodecCase("exact", lambda draw: Exact(), 16.0),
    # 2 bits, and a scale and a zero point of 16 bits for a token of 16 channels: 2 + 32/16.
    CodecCase("uniform-2", lambda draw: UniformQuant(2), 4.0),
    CodecCase("uniform-8-groups", lambda draw: UniformQuant(8, (1, 8)), 12.0),
    # 5 codes of 3 bits a word, so 4 words (4 bits a value) for 16 channels; a scale and a zero point for 8 tokens of a channel.
    CodecCase("uniform-3-channels", lambda draw: UniformQuant(3, (8, 1)), 8.0),
    CodecCase("uniform-4-range", lambda draw: UniformQuant(4, None), 4.0),
    CodecCase("uniform-4-heads", lambda draw: UniformQuant(4, (4, None), across_heads=True), 4.25),
    # In a segment of 64 tokens: 4 + 32/64; with channel scales, 4 + 32/16 + 16/64 and (heads together) 2 + 32/32 + 16/64.
    CodecCase("uniform-4-segment", lambda draw: UniformQuant(4, (None, 1)), 4.5),
    CodecCase("scaled-channels-4", lambda draw: ScaledChannels(UniformQuant(4)), 6.25),
    CodecCase("scaled-channels-2-heads", lambda draw: ScaledChannels(UniformQuant(2, across_heads=True), "tier"), 3.25),
    # 2 + 32/8. A token's 4 channels of largest magnitude out of 16 are clipped to the fifth largest.
    CodecCase("clipped-2", lambda draw: Clipped(UniformQuant(2, (1, 8)), 0.7), 6.0),
    # 3 bits: 4 words for 16 channels, and nothing beside them.
    CodecCase("codebook-3", lambda draw: Codebook.of(torch.randn(9, HEADS, 20, CHANNELS, generator=draw), 3), 4.0),
    # 4 bits, and a norm of 16 bits for 16 channels.
    CodecCase("direction-4", lambda draw: Direction.uniform(CHANNELS, 4), 5.0),
    # Tiles of 8 tokens and 16 channels: 4 + 32/8 + 16/16, 2 + 32/16 + 16/8, and for 3 bits (4 words) 4 + 32/16 + 16/8.
    CodecCase("dual-scale-4-channels", lambda draw: DualScale(4, "channels", 8), 9.0),
    CodecCase("dual-scale-2-tokens", lambda draw: DualScale(2, "tokens", 8), 6.0),
    CodecCase("dual-scale-3-tokens", lambda draw: DualScale(3, "tokens", 8, 0), 8.0),
    # 3 bits: 4 words for 16 channels; a centre and a half range of 16 bits for the 32 channels of both heads.
    CodecCase("token-range-3", lambda draw: TokenRange(Codebook(levels(draw, 8))), 5.0),
    # 3 words of 16 bits a head for 15 components: 48/15.
    CodecCase("mixed", lambda draw: MixedQuant((4, 4, 4, 2, 2), (3, 3)), 3.2, 15, reach=1.0),
    # The same, and one byte for the sizes of both heads' 30 components.
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
    # 4 indices of 5 bits (2 bytes of 4-bit parts, 1 of 1-bit parts) and 4 coefficients of 16 bits: (24 + 64)/16.
    CodecCase("sparse", lambda draw: Sparse(4, offline=dictionary(draw)), 5.5),
    CodecCase(
        "sparse-int4",
        lambda draw: Sparse(4, 2, SharedTable(dictionary(draw).tensor[:, :8]), coefficients=Coefficients(4)),
        5.5,
    ),
]
