"""KVarN (Muller et al., 2026, arXiv:2606.03458): rotate, scale each tile to equal variance of its tokens and of its channels, and
round; no fit."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.contract import Geometry, Method, check_bits
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.per_stream import PerStream, Streams, of_streams
from calib.runtime.stages.codec import Codec, DualScale
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.transform import Orthogonal
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

WIDTHS = tuple({"keys": keys, "values": values} for keys, values in product((1, 2, 3, 4, 5, 6, 8), repeat=2))


@dataclass(frozen=True)
class KVarN(Method):
    """Rounding of keys and values after tokens and channels of a tile are scaled to equal variance.

    1. Attention over a prompt is exact. The first `sinks` tokens stay exact. Later tokens form tiles of `tile` tokens; a tile is
       encoded once it is full, and exact until then.
    2. Keys (after RoPE) and values of a head are rotated by the normalised Hadamard matrix along its channels.
    3. In each tile of a head, scales of the tokens and of the channels are computed alternately, `iterations` times, so that all
       tokens, and all channels, get the same variance; the scales of the round with the least imbalance are used.
    4. The normalised tile is rounded to nearest between the least and largest entry of each channel (keys) or token (values).
       Scales of both axes are kept in 16 bits; the scale of a channel (keys) or token (values) is stored multiplied by the step of
       its codes, as one number.
    5. Cost of an encoded value, keys: bits + 32/tile + 16/head_dim; values: bits + 32/head_dim + 16/tile; more where codes do not
       fill 16-bit words (`kernels/pack`).

    The defaults are those of the authors' release (K4V2, tiles of 128); the paper's results are at 2 bits for both.
    `docs/methods/kvarn.md` lists what differs from the release.

    Args:
        bits: width of a code, 1 ... 8, for both streams, or {keys: ..., values: ...}.
        tile: tokens that are normalised together, 2 ... 512.
        iterations: rounds of the normalisation; 0 is none.
        sinks: first tokens of a row that stay exact.
    """

    name: ClassVar[str] = "kvarn"
    packs: ClassVar[tuple[type[Codec], ...]] = (DualScale,)

    grid: ClassVar[Grid] = Grid({"bits": WIDTHS})

    bits: int | Streams[int] = PerStream(keys=4, values=2)
    tile: int = 128
    iterations: int = 16
    sinks: int = 128

    def __post_init__(self) -> None:
        of_streams("bits", self.bits, check_bits)
        check_whole("sinks", self.sinks, 0, "a whole number of tokens, at least 0", "; 128 is usual")
        self._codecs()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One tier with pages of one tile, the same for every layer."""
        keys, values = (TierStages(Orthogonal.hadamard(geometry.head_dim), codec) for codec in self._codecs())
        tiering = RatioTiers((1.0,), self.tile, multiple_of=self.tile, sinks=self.sinks)
        return TieredPlan((TierPlan(keys, values, page_tokens=self.tile),), tiering)

    def _codecs(self) -> tuple[DualScale, DualScale]:
        """The codecs of keys and of values."""
        keys, values = of_streams("bits", self.bits)
        return (
            DualScale(keys, "channels", self.tile, self.iterations),
            DualScale(values, "tokens", self.tile, self.iterations),
        )
