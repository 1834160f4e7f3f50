"""OSCAR (Zhou et al., 2026, arXiv:2605.17757): rotations fitted to the model's attention, and 2 bits for every coordinate."""

from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.contract import Geometry, Method, check_bits, check_share
from calib.runtime.methods.per_stream import Streams, of_streams
from calib.runtime.stages.codec import Clipped, Codec, UniformQuant
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.transform import Orthogonal
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


@dataclass(frozen=True)
class Oscar(Method):
    """Offline spectral covariance-aware rotation.

    1. Attention over a prompt is exact. The first `sinks` tokens stay exact, and the newest `window`; the window's oldest token is
       encoded when a new one is added.
    2. A key (after RoPE) or value x of a head becomes y = x R by the artifact's rotation of its layer and KV head:
       R = U H P. U are the eigenvectors, largest first, of E[q q^T] for keys and of (S V)^T (S V) for values, S being the attention
       probabilities; H is the Hadamard matrix, which makes all coordinates count the same, and P the bit reversal, which
       spreads neighbours over the groups.
    3. The coordinates of y are clipped to +-m, m being the magnitude of rank floor(clip head_dim) among them, smallest first.
    4. `group` coordinates of a token share a scale and a zero point, each coordinate is a code of `bits`.
    5. Cost of an encoded value: bits + 32/group (2 bits, groups of 128: 2.25), more where codes do not fill 16-bit words
       (`kernels/pack`).

    Needs an artifact: `calib fit --model.rotations true` measures the rotations. The ranks of step 3 are the defaults of the
    authors' code, the same for all layers; no fit searches them.

    Args:
        bits: 1 ... 8 for both streams, or {keys: ..., values: ...}; the paper's are 2.
        group: coordinates that share a scale and a zero point; divides head_dim, and a head has one group where it is larger.
        sinks: first tokens of a row that stay exact.
        window: newest tokens that stay exact.
        key_clip: rank of the magnitude that keys are clipped to, as a share of head_dim in (0, 1]; 1 clips nothing.
        value_clip: the same for values.
    """

    name: ClassVar[str] = "oscar"
    packs: ClassVar[tuple[type[Codec], ...]] = (Clipped,)
    needs_fit: ClassVar[bool] = True

    bits: int | Streams[int] = 2
    group: int = 128
    sinks: int = 64
    window: int = 256
    key_clip: float = 0.96
    value_clip: float = 0.92

    def __post_init__(self) -> None:
        of_streams("bits", self.bits, check_bits)
        check_whole("group", self.group, 1, "a whole number of channels, at least 1", "; 128 is usual")
        check_whole("sinks", self.sinks, 0, "a whole number of tokens, at least 0", "; 64 is usual")
        check_whole("window", self.window, 0, "a whole number of tokens, at least 0", "; 256 is usual")
        check_share("key_clip", self.key_clip)
        check_share("value_clip", self.value_clip)
        self._tiering()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """One tier of all tokens between sinks and window."""
        if artifact is None:
            raise ValueError(
                "method 'oscar' needs calibrated rotations: pass artifact=Artifact.load(...), or --artifact FILE, from "
                "`calib fit --model.rotations true`"
            )
        streams, bits = {"keys": self.key_clip, "values": self.value_clip}, of_streams("bits", self.bits)
        group = self.group if self.group < geometry.head_dim else None
        keys, values = (
            TierStages(
                Orthogonal.of(artifact.tensor(f"{stream}.rotation", wanted_by="oscar")[layer]),
                Clipped(UniformQuant(bits.of(stream), (1, group)), keep),
            )
            for stream, keep in streams.items()
        )
        return TieredPlan((TierPlan(keys, values),), self._tiering())

    def _tiering(self) -> RatioTiers:
        return RatioTiers((1.0,), block=1, window=self.window, sinks=self.sinks)
