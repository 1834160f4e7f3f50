"""The stages of a fit that read the corpus, and what each of them measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One pass over a part of the corpus.

    Attributes:
        name: of the stage, its folder and its checkpoint.
        part: `train` or `heldout`.
        statistics: the entries of `Calibration.statistics` that it fills, as far as the fit has them.
        needs: the entries whose tensors it reads.
        made_of: further entries that what it fills is made of.
    """

    name: str
    part: str
    statistics: tuple[str, ...]
    needs: tuple[str, ...] = ()
    made_of: tuple[str, ...] = ()


MEASURED = ("channel_range", "channel_scale", "balancer", "query_energy")
SENSITIVITY = "sensitivity"  # the stage that differentiates the model, and what `klt` measures in it
TRANSFORMS = ("second_moments", SENSITIVITY, "components")  # what `klt` alone needs
STORAGE = "storage_codes"  # what the profile "storage" of stored chunks needs
ROTATIONS = "rotations"  # what `oscar` alone needs
NON_UNIFORM = ("nuq_ranges", "nuq_levels")  # what `kvquant` alone needs
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
