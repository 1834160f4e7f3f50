"""The figures of a fit, per layer and over all layers: for the table, the logger and the artifact's provenance."""

from typing import Any

from torch import Tensor

from calib.fit.calibration import Calibration
from calib.fit.dictionaries import Dictionaries
from calib.statistics.heldout_error import HeldoutError
from calib.statistics.outlier_thresholds import OutlierThresholds

PERCENTILE = 0.999


def fit_metrics(calibration: Calibration, dictionaries: Dictionaries) -> dict[str, Any]:
    """Returns the figures of a fit.

    `layers`: one dict of numbers for each layer. `overall`: the held-out errors over all layers. `dictionaries`, if any
    were trained: one dict for each group of layers (`Dictionaries.groups`).

    A layer's dict has `keys_low`, `keys_high` (over all channels); `keys_outlier`, the widest channel's half range over
    the median channel's; `keys_tail`, the largest |k| over its 99.9th percentile; the same for values; and the relative
    error of the attention output on held-out text, `error_<bits>bit_<setting>` (settings in `heldout_error.py`).
    """
    ranges = calibration.tensors(("channel_range",))
    outliers, heldout = calibration.statistic("outlier_thresholds"), calibration.statistic("heldout")
    assert isinstance(outliers, OutlierThresholds)
    assert isinstance(heldout, HeldoutError)
    errors = heldout.relative()
    layers = []
    for layer in range(calibration.shape.layers):
        row: dict[str, float] = {"layer": layer}
        for stream, tokens in outliers.tokens(layer).items():
            low, high = ranges[f"{stream}.low"][layer], ranges[f"{stream}.high"][layer]
            row[f"{stream}_low"], row[f"{stream}_high"] = low.min().item(), high.max().item()
            row[f"{stream}_outlier"] = outlier_ratio(low, high)
            largest = max(-row[f"{stream}_low"], row[f"{stream}_high"])
            row[f"{stream}_tail"] = tail_ratio(largest, tokens)
        layers.append(row | heldout.named(errors[layer]))
    overall = heldout.named(heldout.overall())
    groups = {"dictionaries": dictionaries.groups} if dictionaries.groups else {}
    return {"layers": layers, "overall": overall, **groups}


def outlier_ratio(low: Tensor, high: Tensor) -> float:
    """Returns the largest half range of a channel over the median channel's; 1 if the median channel is constant."""
    half = (high - low).flatten() / 2
    median = half.median().item()
    return half.max().item() / median if median > 0 else 1.0


def tail_ratio(largest: float, tokens: Tensor) -> float:
    """Returns `largest` over the 99.9th percentile of all |x| in `tokens`; 1 if that is 0 or there are no entries."""
    entries = tokens.abs().flatten()
    if not len(entries):
        return 1.0
    # torch.quantile refuses more than 2^24 entries.
    percentile = entries.kthvalue(max(1, round(PERCENTILE * len(entries)))).values.item()
    return largest / percentile if percentile > 0 else 1.0
