"""One cell of the matrix: a method, a mode, an architecture and a dtype, run with the cache and with its oracle, and compared."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from cases import BY_NAME as CASES
from contract.architectures import BY_NAME as ARCHITECTURES
from contract.architectures import perturbed
from contract.mirror import Mirror
from contract.modes import MODES, Bench, Outcome
from contract.shadow import Shadow
from contract.watch import Watched, difference, watching
from tolerances import FORWARD, MEMORY
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from calib.runtime.attention import NAME
from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer
from calib.runtime.memory import measure
from calib.runtime.tiered.store import TieredStore

SHARE = 0.6  # most bytes of a compressed cache, as a share of 16 bits a value
# The same for a prompt in chunks of 200 tokens, each with its own low-rank factors: .51 becomes .61, .64 with 32 channels a head.
SHARE_OF_PIECES = 0.65
IN_PIECES = ("chunked prefill", "chunks by hand")
EXACT = 16.0  # marginal bits of a method that keeps tokens after the first forward exactly
DRAFT_NOISE = 0.1


@dataclass(frozen=True)
class Cell:
    """A cell: names from the tables of methods, modes and architectures, and the model's dtype."""

    method: str
    mode: str
    architecture: str
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = "" if self.dtype == torch.float32 else f"-{str(self.dtype).removeprefix('torch.')}"
        return f"{self.architecture}-{self.mode}-{self.method}{kind}".replace(" ", "_")


@dataclass(frozen=True)
class Result:
    """The measurements of a cell.

    Attributes:
        worst: largest difference of a logit from the oracle's, relative to the forward's largest logit.
        share: measured bytes of the fullest cache as a share of 16 bits a value for the same tokens.
        tie: whether the two runs generated different tokens because of a difference of logits within the tolerance.
        forwards: number of forwards of the cell's own run.
        drafts: number of draft tokens, and how many of them the model accepted.
    """

    worst: float
    share: float
    tie: bool
    forwards: int
    drafts: tuple[int, int]


@lru_cache(maxsize=3)
def models(architecture: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel, Shadow]:
    """The model, its draft model and its shadow, cached."""
    model = ARCHITECTURES[architecture].model(dtype)
    return model, perturbed(model, DRAFT_NOISE), Shadow(model)


def allowed(cell: Cell) -> float:
    """The largest share of 16 bits that a cell may use; no limit for a prompt in chunks of which all but the first are exact."""
    if CASES[cell.method].marginal_bits == EXACT and cell.mode in IN_PIECES:
        return math.inf
    corrected = (codec.corrections for codec in CASES[cell.method].plan.codecs())
    factors = any(corrections is not None and corrections.low_rank is not None for corrections in corrected)
    return SHARE_OF_PIECES if factors and cell.mode in IN_PIECES else SHARE


def run(cell: Cell) -> Result:
    """Run the cell and return its measurements; raises AssertionError if it breaks the contract."""
    runs = Runs(cell, *models(cell.architecture, cell.dtype))
    try:
        worst, tie, seen, outcome = runs.compared()
        share = max(map(share_of_16_bits, runs.opened))
        assert cell.method == "full" or share < allowed(cell), f"the cache holds {share:.1%} of 16 bits"
        for cache in runs.opened:
            check_bytes(cache)
    finally:
        for cache in runs.opened:
            cache.release()
    accepted, tried = outcome.get("drafts", torch.zeros(2, dtype=torch.long)).tolist()
    return Result(worst, share, tie, len(seen.inputs), (tried, accepted))


@dataclass
class Runs:
    """The runs of one cell, all with the same seed.

    `opened` are all compressed caches of the runs, `mirrors` those of the current run.
    """

    cell: Cell
    model: PreTrainedModel
    draft: PreTrainedModel
    shadow: Shadow
    opened: list[CompressedCache] = field(default_factory=list)
    mirrors: list[Mirror] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        """Whether the oracle is transformers' DynamicCache, as for `full`; else it is the shadow.

        DynamicCache counts padding between turns as part of a sliding window, while calib counts a row's tokens: in that mode the
        shadow is the oracle of `full` as well.
        """
        return self.cell.method == "full" and not (self.shadow.sliding and self.cell.mode == "turns")

    def compared(self) -> tuple[float, bool, Watched, Outcome]:
        """The largest difference of a logit, whether the runs parted at a tie, and the record and outcome of the method's own run.

        Logits are compared with the shadow in a second run, which continues with the shadow's logits. It has the inputs of the
        method's own run, unless both generate different tokens; then a third run is given the own run's logits up to that forward.
        """
        found, outcome = self.once(self.compressed)
        expected, right = self.once_by_the_oracle()
        parted, worst, tolerance = found.parting(expected), expected.worst, FORWARD[self.cell.dtype]
        if self.plain:
            worst = max(map(difference, found.logits[:parted], expected.logits[:parted]))
        check_difference(worst, tolerance)
        tie = not agree(outcome, right, tolerance)
        if tie:
            # The oracle's run, given this run's logits up to the forward where they part, must continue as this one did: then only
            # logits within the tolerance have made the difference.
            again, instead = self.once_by_the_oracle(given=found.logits[:parted])
            same = again.parting(found) > parted or torch.equal(instead["tokens"], outcome["tokens"])
            assert same, f"the runs part at forward {parted} for another reason than their logits"
            worst = max(worst, again.worst)
            check_difference(worst, tolerance)
        return worst, tie, found, outcome

    def once_by_the_oracle(self, given: list[Tensor] | None = None) -> tuple[Watched, Outcome]:
        """A run that continues with the oracle's logits; the first forwards return the logits `given`."""
        return self.once(self.dynamic if self.plain else self.compressed, answers=True, given=given)

    def once(
        self, opener: Callable[[], Cache], answers: bool = False, given: list[Tensor] | None = None
    ) -> tuple[Watched, Outcome]:
        """One run of the mode with caches from `opener`."""
        torch.manual_seed(23)
        shadow = self.shadow if answers and not self.plain else None
        with warnings.catch_warnings(), watching(self.model, shadow, answers, given) as seen:
            warnings.simplefilter("ignore")
            outcome = MODES[self.cell.mode](Bench(self.model, self.draft, opener, seen.widths))
        for mirror in self.mirrors:
            mirror.check(seen.masks[mirror.cache])
        self.mirrors.clear()
        return seen, outcome

    def compressed(self) -> CompressedCache:
        """A new cache of the cell's method, with a mirror."""
        self.opened.append(CASES[self.cell.method].open(self.model))
        self.mirrors.append(Mirror(self.opened[-1]))
        return self.opened[-1]

    def dynamic(self) -> Cache:
        """A new DynamicCache; the model uses its own attention."""
        for cache in self.opened:
            cache.release()
        assert self.model.config._attn_implementation != NAME
        return DynamicCache(config=self.model.config)


def check_difference(worst: float, tolerance: float) -> None:
    """Assert that the largest relative difference of logits is within the tolerance."""
    assert worst <= tolerance, f"logits differ by {worst:.1e} of the largest, allowed {tolerance:.1e}"


def agree(found: Outcome, expected: Outcome, tolerance: float) -> bool:
    """Whether both outcomes have the same tokens; if so, assert that all other entries differ by at most `tolerance`."""
    if not torch.equal(found["tokens"], expected["tokens"]):
        return False
    for name in found.keys() - {"tokens"}:
        off = difference(found[name], expected[name])
        assert off <= tolerance, f"{name} differ by {off:.1e} of the largest, allowed {tolerance:.1e}"
    return True


def check_bytes(cache: CompressedCache) -> None:
    """Assert that measured bytes equal the predicted ones, to MEMORY. Uncompressed sliding layers may hold one token more after a
    step, and one for a speculative token."""
    memory, others = cache.memory(), [layer for layer in cache.layers if not isinstance(layer, CompressedLayer)]
    beside, predicted = measure(others), memory.by_kind["uncompressed"]
    slack = sum(2 * layer.keys[:, :, :1].nbytes for layer in others) * (1 if cache.speculator is None else 2)
    assert 0 <= beside - predicted <= MEMORY * predicted + slack, memory
    own, predicted = memory.measured_bytes - beside, memory.predicted_bytes - predicted
    assert abs(own - predicted) <= MEMORY * predicted, memory


def share_of_16_bits(cache: CompressedCache) -> float:
    """Bytes of the compressed layers as a share of 16 bits a value for the rows' tokens without padding.

    Tables are left out: they do not grow with tokens, and those of `klt` are larger than the few tokens of a cell.
    """
    values, sliding = 0, cache.sequences.sliding
    for layer in cache.compressed:
        # Tiers keep tokens outside a sliding window: they are in no order by which pages could be freed.
        most = float("inf") if sliding is None or isinstance(layer.store, TieredStore) else sliding - 1
        values += sum(layer.store.footprint().values * min(length, most) for length in cache.sequences.lengths)
    memory = cache.memory()
    apart = memory.by_kind["uncompressed"] + memory.by_kind["tables"]
    return (memory.measured_bytes - apart) / (2 * values)
