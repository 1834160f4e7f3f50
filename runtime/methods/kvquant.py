"""KVQuant (Hooper et al., 2024, arXiv:2401.18079): non-uniform levels weighted by sensitivity, keys before RoPE, exact outliers."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.nuq_tensors import NUQ_BITS, NUQ_SHARES, levels_name
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.methods.per_stream import Streams, of_streams
from calib.runtime.stages.codec import Codebook, Codec, Corrected, TokenRange
from calib.runtime.stages.correction import Outliers
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.transform import ChannelRange, Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class KVQuant(Method):
    """Per-channel keys before RoPE, per-token values, a fitted table of levels for each layer and stream, 1 % outliers exact.

    1. Attention over a prompt is exact. The first `sinks` tokens stay exact (section 3.5).
    2. Keys are encoded as they were before RoPE (section 3.2), each channel by a centre and a half range that the fit fixed: the
       range of the channel without its outliers. Values are encoded by the range of their token without its outliers, over the
       channels of all KV heads (section 3.1).
    3. A value on [-1, 1] becomes the index of the nearest of 2^bits levels, one table for the keys of a layer and one for its
       values: k-means of the calibration's values, weighted by the squared derivatives of the loss (section 3.3).
    4. The share `outliers` of a token's entries is kept in 16 bits, each with an index (section 3.4): of keys the entries beyond
       their channel's range, of values the largest and the smallest entries of the token.
    5. Tokens are encoded one by one. Attention decodes a tile of keys and rotates it to its positions.

    A page holds the same number of outliers for every token: of values k at each end, of keys 2k, the entries that are farthest
    beyond their channel's range, measured in half ranges. Key entries beyond the range that get no slot are clipped to the
    outermost level, and counted. k is `outliers` / 2 of the channels of all KV heads, rounded down, at least 1. This rule is not
    the paper's, nor is that the 16 bits hold an outlier's difference from its level's value.

    The paper's Q-norm, an addition for 2 bits, is not implemented.

    Needs an artifact of a fit with `--model.nuq [0.01]`.

    Args:
        bits: width of an index, 2, 3 or 4, for both streams, or {keys: ..., values: ...}.
        outliers: share of entries kept in 16 bits, one of the shares that the artifact was fitted for; 0 keeps none.
        sinks: first tokens of a row that stay exact.
    """

    name: ClassVar[str] = "kvquant"
    packs: ClassVar[tuple[type[Codec], ...]] = (Codebook, TokenRange)
    needs_fit: ClassVar[bool] = True
    own_corrections: ClassVar[bool] = True
    before_rope: ClassVar[bool] = True

    bits: int | Streams[int] = 4
    outliers: float = 0.01
    sinks: int = 1

    def __post_init__(self) -> None:
        of_streams("bits", self.bits, _check_levels)
        if type(self.outliers) not in (float, int) or not 0 <= self.outliers < 1:
            raise ValueError(
                f"outliers must be a share from 0 to below 1, got {printable(self.outliers)}; 0.01 is the paper's"
            )
        check_whole("sinks", self.sinks, 0, "a whole number of tokens, at least 0", "; 1 is the paper's")

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One tier for all tokens after the sinks, each encoded right after the forward that added it."""
        if artifact is None:
            raise ValueError(
                "method 'kvquant' needs fitted levels: pass artifact=Artifact.load(...), or --artifact FILE, from "
                f"`calib fit --model.nuq [{self.outliers:g}]`"
            )
        share = self._share(artifact)
        low, high = (artifact.tensor(f"keys.nuq.{end}", self.name)[layer, ..., share] for end in ("low", "high"))
        keys, values = (Codebook(self._levels(stream, layer, share, artifact)) for stream in ("keys", "values"))
        tier = TierPlan(
            TierStages(
                ChannelRange.between(low, high), self._sparse(keys, geometry, torch.ones((), dtype=torch.float32))
            ),
            TierStages(Identity(), self._sparse(TokenRange(values), geometry)),
        )
        return TieredPlan((tier,), RatioTiers((1.0,), block=1, sinks=self.sinks), before_rope=True)

    def _sparse(self, codec: Codec, geometry: Geometry, reach: Tensor | None = None) -> Codec:
        """`codec` with its outliers: entries beyond `reach` on either side, or without it the largest and smallest ones."""
        if not self.outliers:
            return codec
        outliers = Outliers(self.outliers, "channels", across_heads=True, heads=geometry.kv_heads)
        if reach is not None:
            outliers = replace(outliers, low=-reach, high=reach, farthest=True)
        return Corrected(codec, outliers)

    def _levels(self, stream: str, layer: int, share: int, artifact: Artifact) -> Tensor:
        """The table of a layer's stream, `[1, 2^bits]`."""
        bits = of_streams("bits", self.bits).of(stream)
        return artifact.tensor(levels_name(stream, bits), self.name)[layer, share][None]

    def _share(self, artifact: Artifact) -> int:
        """The index of `outliers` among the artifact's fitted shares; ValueError if it is none of them."""
        shares = artifact.tensor(NUQ_SHARES, self.name).tolist()
        chosen = [number for number, share in enumerate(shares) if abs(share - self.outliers) < 1e-6]
        # The levels for share 0 are for no outliers; with any other share at least one entry at each end is kept.
        chosen = [number for number in chosen if (shares[number] > 0) == (self.outliers > 0)]
        if not chosen:
            known = ", ".join(f"{share:g}" for share in shares)
            raise ValueError(
                f"outliers={self.outliers:g}: the artifact has levels for {known}; use one of these, or fit with --model.nuq "
                f"[{self.outliers:g}]"
            )
        return chosen[0]


def _check_levels(name: str, bits: Any) -> None:
    """Raises ValueError for a width that `calib fit` makes no levels for."""
    if type(bits) is not int or bits not in NUQ_BITS:
        raise ValueError(f"{name} must be {', '.join(map(str, NUQ_BITS))}, got {printable(bits)}; 4 is the default")
