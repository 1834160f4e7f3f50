"""What a method decides for one tier: keys and values of the same tokens, each stream in its own encoding."""

from dataclasses import dataclass, replace
from typing import Literal

from calib.runtime.paging.pages import TIER_PAGE_TOKENS
from calib.runtime.stages.contract import Codec, Segment, Transform
from calib.runtime.stages.prediction import Prediction
from calib.runtime.stages.transform import Measured
from calib.runtime.store import Recoding


@dataclass(frozen=True)
class TierStages:
    """How one stream of a tier is encoded; a measured transform is fitted to each row's first chunk."""

    transform: "Transform | Measured"
    codec: Codec


# What a segment is in a tier: nothing (tokens come in any numbers), a row's tokens, or a page's.
Segments = Literal["none", "row", "page"]


@dataclass(frozen=True)
class TierPlan:
    """A tier that is stored.

    `relocated` ones are met with a query at its position inside the cache (StreamingLLM). Where all of a row's tokens are one
    segment, what they share lies in the row's record; where a page's are, in the page, of `page_tokens`. With a `prediction`,
    what is encoded of values is their distance from what the codes of their keys predict.
    """

    keys: TierStages
    values: TierStages
    relocated: bool = False
    segments: Segments = "none"
    page_tokens: int = TIER_PAGE_TOKENS
    prediction: Prediction | None = None

    def streams(self) -> tuple[tuple[str, TierStages], tuple[str, TierStages]]:
        """Both streams by name."""
        return ("keys", self.keys), ("values", self.values)

    @property
    def encodes_any_number(self) -> bool:
        """Whether tokens have the same codes however many, in whole groups, are encoded at once."""
        return self.segments == "none" and all(_encodes_any_number(stages.codec) for _, stages in self.streams())

    def recoded(self, change: Recoding) -> "TierPlan":
        """Both streams with other codecs."""
        keys, values = (
            replace(stages, codec=change(role, stages.transform, stages.codec)) for role, stages in self.streams()
        )
        return replace(self, keys=keys, values=values)

    def segment(self, heads: int, longest: int) -> Segment | None:
        """The size that fields are laid out for; a row's segment has `longest` tokens at most."""
        if self.segments == "none":
            return None
        return Segment(heads, longest if self.segments == "row" else self.page_tokens)


def _encodes_any_number(codec: Codec) -> bool:
    corrected, plain = codec.corrections, codec.uncorrected
    # Products with the vectors of a low rank are rounded by how many tokens they are of.
    ranked = corrected is not None and corrected.low_rank is not None
    return not (ranked or plain.over_all_tokens or plain.row_by_row)
