"""The names of calibrated transforms (the method `klt`): bases, and what each bit of a component is worth.

Of a stream, L layers, H KV heads, D head_dim, float32, all four or none:

    {stream}.mean    [L, H, D]
    {stream}.basis   [L, H, D, D]  T: rows are components, y = T (x - mean); errors of all components count the same
    {stream}.steps   [L, H, D, 8]  of 1 ... 8 bits
    {stream}.errors  [L, H, D, 9]  E (y - y^)^2 at 0 ... 8 bits, most at 0 bits first

Of keys before RoPE and of values, each token over its own size (`runtime/stages/codec/sized.py`), with means and bases as above;
and of what keys do not predict of values (`runtime/stages/prediction.py`), with the means of values:

    keys.klt.sized, values.klt.sized   .steps, .errors
    values.klt.predicted               .basis, .steps, .errors, .matrix [L, H, D, D] M: of values, from keys before RoPE;
                                       errors are in units of the token's size

For stored chunks, where a load decodes all of a layer's heads and what is decoded helps (`runtime/storage/joint_layer.py`),
W = H D channels, keys before RoPE; all or none of a stream:

    keys.storage, values.storage   .mean [L, 1, W], .basis [L, 1, W, W], .steps [L, 1, W, 8], .errors [L, 1, W, 9], as above
    keys.storage.matrix    [L, 2 W, W]  of keys, from the decoded keys and values of the layer before; 0 in the first layer
    values.storage.matrix  [L, 3 W, W]  of values, from the same, and behind them the decoded keys of the layer

    klt.before.loss  [n, 2]        errors predicted for all layers, keys before RoPE and values together; measured KL, nats a token
    klt.loss         [n, 2]        the same of keys after RoPE
"""

from collections.abc import Iterable

from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError

# Keys as a cache stores them, values, and keys unrotated to position 0.
TRANSFORMS = ("keys.klt", "values.klt", "keys.klt.before")
KINDS = ("mean", "basis", "steps", "errors")
SIZED = {"keys.klt.sized": "keys.klt.before", "values.klt.sized": "values.klt"}  # and whose means and bases they have
PREDICTED = "values.klt.predicted"
STREAM_KINDS = {
    **dict.fromkeys(TRANSFORMS, KINDS),
    **dict.fromkeys(SIZED, ("steps", "errors")),
    PREDICTED: ("basis", "steps", "errors", "matrix"),
}
STORAGE = ("keys.storage", "values.storage")
LOSSES = {"before": "klt.before.loss", "after": "klt.loss"}


def check_complete(names: Iterable[str]) -> None:
    """Raises `ArtifactError` where a stream has some of its tensors and not the others."""
    there = set(names)
    for stream, kinds in (*STREAM_KINDS.items(), *((stream, (*KINDS, "matrix")) for stream in STORAGE)):
        found = [kind for kind in kinds if f"{stream}.{kind}" in there]
        missing = [kind for kind in kinds if kind not in found]
        if found and missing:
            raise ArtifactError(
                f"tensor '{stream}.{found[0]}' is present and '{stream}.{missing[0]}' is not, expected both; {FIT_AGAIN}"
            )
