"""The loss caused by errors e of a layer's keys and values: e^T W e, with the sensitivities W that `calib fit` has measured.

The artifact has the basis T of `klt` for each layer and KV head, with T^T T = W. The loss of a token is |T_k (k - k^)|^2 +
|T_v (v - v^)|^2, summed over the heads (k^ and v^ are decoded); the loss of a layer is the mean over its encoded or evicted tokens.
An evicted token cannot be decoded: its error is its difference from the mean of its keys or values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.errors import UsageError
from calib.evaluate.stored import STREAMS, Stored, stored
from calib.runtime import Artifact
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.tiered.store import TieredStore


@dataclass(frozen=True)
class Sensitivity:
    """Sensitivity of one layer's keys or values: `basis` T `[kv_heads, D, D]`, `mean [kv_heads, 1, D]`, both float32 (D:
    head_dim)."""

    basis: Tensor
    mean: Tensor

    def of(self, error: Tensor) -> Tensor:
        """Returns e^T W e `[kv_heads, n]` of n errors `[kv_heads, n, D]`."""
        return (error @ self.basis.mT).square().sum(-1)


@dataclass(frozen=True)
class Loss:
    """Sums over rows: `total` loss of the keys or values, and number of `tokens` that were encoded or evicted."""

    total: float
    tokens: int

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.total + other.total, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        """Mean loss of a token; 0 if there are none."""
        return self.total / self.tokens if self.tokens else 0.0


def check_sensitivities(artifact: Artifact, name: str) -> None:
    """Raises UsageError if the artifact has no sensitivities."""
    for role in STREAMS:
        if not artifact.has(f"{role}.klt.basis"):
            raise UsageError(
                f"artifact '{name}' has no '{role}.klt.basis', which says how much an error matters; give the artifact that this "
                "one was exported from, or a new one of `calib fit`"
            )


def sensitivities(artifact: Artifact, layer: int, device: torch.device) -> dict[str, Sensitivity]:
    """Returns the sensitivities of a layer's keys and values on `device`."""
    return {
        role: Sensitivity(
            artifact.tensor(f"{role}.klt.basis")[layer].to(device),
            artifact.tensor(f"{role}.klt.mean")[layer][:, None].to(device),
        )
        for role in STREAMS
    }


def losses(sample: LayerSample, store: OrderedStore | TieredStore, worth: dict[str, Sensitivity]) -> dict[str, Loss]:
    """Returns the losses of keys and values over all rows of a sample without padding that is in `store`.

    The store must know the positions of its tokens.
    """
    found = {role: Loss(0.0, 0) for role in STREAMS}
    for row in range(len(sample.keys)):
        held = stored(store, row)
        for role in STREAMS:
            found[role] += stream_loss(
                getattr(sample, role)[row], held[role], evicted(store, row, held[role]), worth[role]
            )
    return found


def stream_loss(given: Tensor, held: Stored, gone: Tensor | None, worth: Sensitivity) -> Loss:
    """Returns the loss of one row with exact keys or values `given [kv_heads, T, D]` (T tokens).

    `gone`, bool `[kv_heads, T]`, marks evicted tokens.
    """
    exact = given.float()
    positions = held.positions.to(given.device)[..., None].expand(held.tokens.shape)
    total = worth.of(exact.gather(1, positions) - held.tokens.to(given.device)).sum(dtype=torch.float64)
    tokens = held.tokens.shape[1]
    if gone is not None:
        total += (worth.of(exact - worth.mean) * gone).sum(dtype=torch.float64)
        tokens += int(gone[0].sum())
    return Loss(float(total), tokens)


def evicted(store: OrderedStore | TieredStore, row: int, held: Stored) -> Tensor | None:
    """Returns a mask of the evicted tokens of a row, which are in no tier and not exact: bool `[kv_heads, T]`; None if none is."""
    length = store.sequences.lengths[row]
    if isinstance(store, OrderedStore) or store.sequences.kept(row, length) == length:
        return None
    sinks, exact = store.sequences.sinks, store.sequences.exact(row, length)
    gone = torch.zeros(held.positions.shape[0], length, dtype=torch.bool, device=held.positions.device)
    gone[:, sinks : length - exact + sinks] = True
    return gone.scatter_(1, held.positions, False)
