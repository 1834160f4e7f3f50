"""The tensors of calibrated transforms (the method `klt`): bases, and what each bit of a component is worth.

Of a stream, L layers, H KV heads, D head_dim, float32, all four or none:

    {stream}.mean    [L, H, D]
    {stream}.basis   [L, H, D, D]  T: rows are components, y = T (x - mean); errors of all components count the same
    {stream}.steps   [L, H, D, 8]  of 1 ... 8 bits
    {stream}.errors  [L, H, D, 9]  E (y - y^)^2 at 0 ... 8 bits, most at 0 bits first

    klt.before.loss  [n, 2]        errors predicted for all layers, keys before RoPE and values together; measured KL, nats a token
    klt.loss         [n, 2]        the same of keys after RoPE
"""

from collections.abc import Mapping

from torch import Tensor

from calib.runtime.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.tensor_checks import check_shape, check_values

# Keys as a cache stores them, values, and keys turned back to position 0.
TRANSFORMS = ("keys.klt", "values.klt", "keys.klt.before")
KINDS: Mapping[str, str] = {
    "mean": "[layers, kv_heads, head_dim]",
    "basis": "[layers, kv_heads, head_dim, head_dim]",
    "steps": "[layers, kv_heads, head_dim, 8]",
    "errors": "[layers, kv_heads, head_dim, 9]",
}
LOSSES = {"before": "klt.before.loss", "after": "klt.loss"}
CALIBRATORS = {f"{stream}.{kind}": "components" for stream in TRANSFORMS for kind in KINDS} | dict.fromkeys(
    LOSSES.values(), "loss_curve"
)


def check_transforms(tensors: Mapping[str, Tensor], layers: int, kv_heads: int, head_dim: int) -> None:
    """Raises `ArtifactError` where a tensor of a transform is not what its name promises, or lacks another."""
    for stream in TRANSFORMS:
        found = {kind: tensors[f"{stream}.{kind}"] for kind in KINDS if f"{stream}.{kind}" in tensors}
        if not found:
            continue
        for (kind, axes), last in zip(KINDS.items(), ([], [head_dim], [8], [9]), strict=True):
            if kind not in found:
                raise ArtifactError(
                    f"tensor '{stream}.{next(iter(found))}' is present and '{stream}.{kind}' is not, expected both; "
                    f"{FIT_AGAIN}"
                )
            check_shape(f"{stream}.{kind}", found[kind], [layers, kv_heads, head_dim, *last], axes)
        check_values(f"{stream}.steps", found["steps"], above=0)
        check_values(f"{stream}.errors", found["errors"], at_least=0)
        errors = found["errors"]
        if bool((errors.diff(dim=-1) > 0).any() | (errors[..., 0].diff(dim=-1) > 0).any()):
            raise ArtifactError(
                f"tensor '{stream}.errors' increases with bits or from component to component, expected neither; {FIT_AGAIN}"
            )
        nothing = (found["basis"] == 0).all(-1)
        if bool(nothing.any()):
            layer, head, row = nothing.nonzero()[0].tolist()
            raise ArtifactError(
                f"tensor '{stream}.basis' is 0 in row {row} at layer {layer}, head {head}, expected rows that span the head; "
                f"{FIT_AGAIN}"
            )
    for name in LOSSES.values():
        if name in tensors:
            curve = tensors[name]
            check_shape(name, curve, [max(1, len(curve)) if curve.dim() else 1, 2], "[budgets, 2]")
            check_values(name, curve, at_least=0)
