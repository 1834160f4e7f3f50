"""The names of calibrated transforms (the method `klt`): bases, and the error of each component by its bits.

L layers, H KV heads, D head_dim; all tensors are float32. A stream has all four or none:

    {stream}.mean    [L, H, D]
    {stream}.basis   [L, H, D, D]  T: rows are components, y = T (x - mean); errors of all components count the same
    {stream}.steps   [L, H, D, 8]  the quantiser's step with 1 ... 8 bits
    {stream}.errors  [L, H, D, 9]  E (y - y^)^2 with 0 ... 8 bits; the component with the largest error at 0 bits first

For keys before RoPE and values with each token divided by its size (`runtime/stages/codec/sized.py`), with means and bases as
above; and for the part of values that keys do not predict (`runtime/stages/prediction.py`), with the means of values:

    keys.klt.sized, values.klt.sized   .steps, .errors
    values.klt.predicted               .basis, .steps, .errors, .matrix [L, H, D, D] M: predicts values from keys before RoPE;
                                       errors are in units of the token's size

For stored chunks, where all heads of a layer are decoded together and predicted from what was decoded before them
(`runtime/storage/joint_layer.py`), W = H D channels, keys before RoPE; a stream has all or none:

    keys.storage, values.storage   .mean [L, 1, W], .basis [L, 1, W, W], .steps [L, 1, W, 8], .errors [L, 1, W, 9], as above
    keys.storage.matrix    [L, 2 W, W]  predicts keys from the decoded keys and values of the layer before; 0 in the first layer
    values.storage.matrix  [L, 3 W, W]  predicts values from the same and, after them, the decoded keys of the layer

    klt.before.loss  [n, 2]        for n budgets: predicted error of all keys (before RoPE) and values; measured KL, nats a token
    klt.loss         [n, 2]        the same with keys after RoPE
"""

from collections.abc import Iterable

from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError

# Keys after RoPE, values, and keys before RoPE.
TRANSFORMS = ("keys.klt", "values.klt", "keys.klt.before")
KINDS = ("mean", "basis", "steps", "errors")
SIZED = {"keys.klt.sized": "keys.klt.before", "values.klt.sized": "values.klt"}  # and whose means and bases they use
PREDICTED = "values.klt.predicted"
STREAM_KINDS = {
    **dict.fromkeys(TRANSFORMS, KINDS),
    **dict.fromkeys(SIZED, ("steps", "errors")),
    PREDICTED: ("basis", "steps", "errors", "matrix"),
}
STORAGE = ("keys.storage", "values.storage")
LOSSES = {"before": "klt.before.loss", "after": "klt.loss"}


def check_complete(names: Iterable[str]) -> None:
    """Raises `ArtifactError` if a stream has some of its tensors and not the others."""
    there = set(names)
    for stream, kinds in (*STREAM_KINDS.items(), *((stream, (*KINDS, "matrix")) for stream in STORAGE)):
        found = [kind for kind in kinds if f"{stream}.{kind}" in there]
        missing = [kind for kind in kinds if kind not in found]
        if found and missing:
            raise ArtifactError(
                f"tensor '{stream}.{found[0]}' is present and '{stream}.{missing[0]}' is not, expected both; {FIT_AGAIN}"
            )
