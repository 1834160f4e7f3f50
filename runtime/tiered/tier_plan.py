"""What a method decides for one tier: how the keys and the values of its tokens are encoded, each on its own."""

from dataclasses import dataclass, replace
from typing import Literal

from calib.runtime.paging.pages import TIER_PAGE_TOKENS
from calib.runtime.stages.contract import Codec, Segment, Transform
from calib.runtime.stages.prediction import Prediction
from calib.runtime.stages.transform import Measured
from calib.runtime.store import Recoding


@dataclass(frozen=True)
class TierStages:
    """How keys or values of a tier are encoded; a `Measured` transform is fitted to each row's first chunk."""

    transform: "Transform | Measured"
    codec: Codec


# What shares parameters as one segment: nothing (tokens are encoded in any numbers), a row's tokens, or a page's.
Segments = Literal["none", "row", "page"]


@dataclass(frozen=True)
class TierPlan:
    """The plan of a stored tier.

    With `relocated`, its tokens are attended at their positions inside the cache (StreamingLLM). With `segments="row"`, the
    parameters that a row's tokens share are in the row's record; with "page", those of a page's tokens are in the page, of
    `page_tokens` slots. With a `prediction`, values are encoded as their difference from what the codes of their keys predict.
    """

    keys: TierStages
    values: TierStages
    relocated: bool = False
    segments: Segments = "none"
    page_tokens: int = TIER_PAGE_TOKENS
    prediction: Prediction | None = None

    def streams(self) -> tuple[tuple[str, TierStages], tuple[str, TierStages]]:
        """The stages of keys and of values, by name."""
        return ("keys", self.keys), ("values", self.values)

    @property
    def encodes_any_number(self) -> bool:
        """Whether tokens get the same codes however many, in whole groups, are encoded together."""
        return self.segments == "none" and all(_encodes_any_number(stages.codec) for _, stages in self.streams())

    def recoded(self, change: Recoding) -> "TierPlan":
        """The same tier with the codecs that `change` returns for keys and for values."""
        keys, values = (
            replace(stages, codec=change(role, stages.transform, stages.codec)) for role, stages in self.streams()
        )
        return replace(self, keys=keys, values=values)

    def segment(self, heads: int, longest: int) -> Segment | None:
        """The segment that fields are laid out for, or None; a row's segment has at most `longest` tokens."""
        if self.segments == "none":
            return None
        return Segment(heads, longest if self.segments == "row" else self.page_tokens)


def _encodes_any_number(codec: Codec) -> bool:
    corrected, plain = codec.corrections, codec.uncorrected
    # Products with low-rank vectors round differently for different numbers of tokens.
    ranked = corrected is not None and corrected.low_rank is not None
    return not (ranked or plain.over_all_tokens or plain.row_by_row)
