"""The stages of a fit that read the corpus, and the statistics that each of them fills."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One pass over a part of the corpus.

    Attributes:
        name: of the stage and its checkpoint.
        part: `train` or `heldout`, of the corpus.
        statistics: the entries of `Calibration.statistics` that it fills, those that the fit's options leave out excepted.
        needs: the entries whose tensors (`Statistic.tensors`) it reads.
        made_of: further entries whose buffers it reads; like those in `needs`, they must be complete.
    """

    name: str
    part: str
    statistics: tuple[str, ...]
    needs: tuple[str, ...] = ()
    made_of: tuple[str, ...] = ()


MEASURED = ("channel_range", "channel_scale", "balancer", "query_energy")
SENSITIVITY = "sensitivity"  # the stage that differentiates the model, and the statistic of `klt` that it fills
TRANSFORMS = ("second_moments", SENSITIVITY, "components")  # needed only by `klt`
STORAGE = "storage_codes"  # needed only by the profile "storage" of stored chunks
ROTATIONS = "rotations"  # needed only by `oscar`
NON_UNIFORM = ("nuq_ranges", "nuq_levels")  # needed only by `kvquant`
STAGES = (
    Stage(
        "statistics",
        "train",
        (*MEASURED, "outlier_thresholds", "vectors", "second_moments", STORAGE, ROTATIONS, "nuq_ranges"),
    ),
    Stage(SENSITIVITY, "train", (SENSITIVITY, "nuq_levels"), made_of=("nuq_ranges",)),
    Stage(
        "clip",
        "train",
        ("clip", "residual_basis", "components"),
        needs=MEASURED,
        made_of=("second_moments", SENSITIVITY),
    ),
    Stage("evaluate", "heldout", ("heldout", "heldout_vectors"), needs=(*MEASURED, "clip")),
)
