"""SpeCache (Jie et al., 2025, arXiv:2503.16163): the full cache in host memory, and the pairs that a step needs prefetched."""

from dataclasses import dataclass, fields
from statistics import fmean
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.methods.basis import Basis, KeyBias
from calib.runtime.methods.calibration import clip_of_streams
from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.kivi import Kivi
from calib.runtime.methods.paper_counting import CountedCache, specache_size
from calib.runtime.methods.per_stream import PerStream, Streams, of_streams
from calib.runtime.offload.plan import OffloadPlan
from calib.runtime.stages.placement import TopTokens
from calib.runtime.store import Plan


@dataclass(frozen=True)
class SpeCache(Method):
    """A low-bit copy on the device finds the tokens that matter; their exact pairs are fetched from the host and attended instead.

    1. Prefill (Algorithm 1): exact attention; each layer is quantised and offloaded before the next one runs. So is every
       later forward of several tokens, which attends to the exact copy on the host.
    2. Pre-decode (Algorithm 2): the first token runs speculatively on the low-bit copy; its keys and values are dropped.
    3. Step (Algorithm 3): a forward over the true token and a speculative next one; `k` exact pairs of each KV head replace
       their low-bit copies. The true token's output is the step's output; the speculative token's output gives the next
       speculative token, and the `k` tokens that get the most attention from it (probabilities, summed over the query heads) are
       fetched during the step. Only the true token is kept.
    4. With `speculative=False` a step scores on the low-bit copy, fetches and attends again.

    Every forward of one token in `model.generate(past_key_values=cache)` is such a step.

    Args:
        k: exact pairs of each layer and KV head; 0: the low-bit copy alone.
        speculative: True: pairs are prefetched for a speculative next token; False: they are fetched within the step.
        bits: bits of the low-bit copy, which is `kivi`'s; this and the next three are one setting or {keys: ..., values: ...}.
        group: group size of the low-bit copy.
        residual: exact window R of the low-bit copy. R values are exact besides the step's own token, as in KIVI's released code;
            {keys: R, values: R - 1} counts that token among them, as KIVI's algorithm 1 does.
        clip: clip factor of the low-bit copy; at 1 bit None is 0.5 (eq. 3) unless the artifact's is used. The artifact's is not
            used in another basis, nor for keys with `key_bias="folded"`.
        low: another low-bit copy instead, as `build` makes it of {method: csr, sparsity: 8}: any that keeps every token.
        basis: of the low-bit copy: the coordinates that are rounded, "none", "hadamard" or "calibrated", as in `kivi`.
        key_bias: of the low-bit copy: "kept" or "folded", as in `kivi`.
    """

    name: ClassVar[str] = "specache"

    grid: ClassVar[Grid] = Grid({name: Kivi.grid.by_layer[name] for name in ("bits", "group", "clip")}, fetched="k")

    k: int = 64
    speculative: bool = True
    bits: int | Streams[int] = 2
    group: int | Streams[int] = 32
    residual: int | Streams[int] = 64
    clip: float | Streams[float | None] | None = None
    low: Method | None = None
    basis: Basis = "none"
    key_bias: KeyBias = "kept"

    def __post_init__(self) -> None:
        TopTokens(self.k, self.speculative)
        if self.low is None:
            self._kivi(None)
            return
        if not hasattr(self.low, "plan"):
            raise ValueError(f"low must be a mapping such as {{method: csr, sparsity: 8}}, got {printable(self.low)}")
        own = {field.name: field.default for field in fields(self)}
        for name in ("bits", "group", "residual", "clip", "basis", "key_bias"):
            if getattr(self, name) != own[name]:
                raise ValueError(
                    f"{name}={printable(getattr(self, name))} is an option of the default low-bit copy, "
                    "which `low` replaces; give it within `low`"
                )

    def _kivi(self, artifact: Artifact | None) -> Kivi:
        # The artifact's clip factors hold for channels without rotation, and for keys with their bias.
        measured = artifact is not None and self.basis == "none"
        known = PerStream(measured and self.key_bias == "kept", measured)
        each = zip(clip_of_streams(self.clip), of_streams("bits", self.bits), known, strict=True)
        clip = PerStream(*(0.5 if own is None and bits == 1 and not told else own for own, bits, told in each))
        return Kivi(self.bits, self.group, self.residual, clip=clip, basis=self.basis, key_bias=self.key_bias)

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> OffloadPlan:
        """The low-bit copy's plan, and the policy that chooses the fetched tokens."""
        low: Plan = (self.low or self._kivi(artifact)).plan(layer, geometry, artifact)
        check_keeps_all(low, repr(self.low))
        return OffloadPlan(low, TopTokens(self.k, self.speculative))

    def paper_bits(self, cache: CountedCache) -> float | None:
        """Bits per value on the device by the paper's count, mean of keys and values; None with another copy (`low`)."""
        if self.low is not None:
            return None
        options = ("bits", self.bits), ("group", self.group), ("residual", self.residual)
        both = zip(*(of_streams(name, option) for name, option in options), strict=True)
        return 16 * fmean(specache_size(bits, group, residual + self.k, cache.length) for bits, group, residual in both)


def check_keeps_all(plan: Plan, method: str) -> None:
    """Raises ValueError if the plan of `method` cannot be a low-bit copy: its tokens are in host memory, or it evicts some."""
    if plan.on_host:
        raise ValueError(
            f"low: {method} keeps its own tokens in host memory; use a method that keeps every token on the device"
        )
    if plan.evicts:
        raise ValueError(
            f"low: {method} drops tokens, and the low-bit copy must score every token; use a method that keeps them all"
        )
