"""What an error of a layer's keys and values is worth: e^T W e, with the sensitivities W that `calib fit` has measured.

The artifact has for each layer and KV head the basis T of `klt`, and T^T T = W. The loss of a token is |T_k (k - k^)|^2 +
|T_v (v - v^)|^2, summed over the heads; of a layer the mean over the tokens that the method has encoded, or evicted. Of an
evicted token nothing is left that could be decoded: its error is counted as what it differs by from the mean of its stream.
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
    """Of one stream of one layer: `basis` T `[kv_heads, D, D]`, `mean [kv_heads, 1, D]`, both float32."""

    basis: Tensor
    mean: Tensor

    def of(self, error: Tensor) -> Tensor:
        """e^T W e of errors `[kv_heads, n, D]`: `[kv_heads, n]`."""
        return (error @ self.basis.mT).square().sum(-1)


@dataclass(frozen=True)
class Loss:
    """Sums over rows: of a stream's losses, and its tokens that were encoded or evicted."""

    total: float
    tokens: int

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.total + other.total, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        """Of a token; 0 where none was encoded."""
        return self.total / self.tokens if self.tokens else 0.0


def check_sensitivities(artifact: Artifact, name: str) -> None:
    """UsageError where the artifact does not say what an error is worth."""
    for role in STREAMS:
        if not artifact.has(f"{role}.klt.basis"):
            raise UsageError(
                f"artifact '{name}' has no '{role}.klt.basis', which says how much an error matters; give the artifact that this "
                "one was exported from, or a new one of `calib fit`"
            )


def sensitivities(artifact: Artifact, layer: int, device: torch.device) -> dict[str, Sensitivity]:
    """Of both streams of a layer."""
    return {
        role: Sensitivity(
            artifact.tensor(f"{role}.klt.basis")[layer].to(device),
            artifact.tensor(f"{role}.klt.mean")[layer][:, None].to(device),
        )
        for role in STREAMS
    }


def losses(sample: LayerSample, store: OrderedStore | TieredStore, worth: dict[str, Sensitivity]) -> dict[str, Loss]:
    """Of both streams, all rows of a sample without padding that `store` holds; it must know its positions."""
    found = {role: Loss(0.0, 0) for role in STREAMS}
    for row in range(len(sample.keys)):
        held = stored(store, row)
        for role in STREAMS:
            found[role] += stream_loss(
                getattr(sample, role)[row], held[role], evicted(store, row, held[role]), worth[role]
            )
    return found


def stream_loss(given: Tensor, held: Stored, gone: Tensor | None, worth: Sensitivity) -> Loss:
    """Of one row's `given [kv_heads, T, D]`; `gone` bool `[kv_heads, T]` are tokens that were evicted."""
    exact = given.float()
    positions = held.positions.to(given.device)[..., None].expand(held.tokens.shape)
    total = worth.of(exact.gather(1, positions) - held.tokens.to(given.device)).sum(dtype=torch.float64)
    tokens = held.tokens.shape[1]
    if gone is not None:
        total += (worth.of(exact - worth.mean) * gone).sum(dtype=torch.float64)
        tokens += int(gone[0].sum())
    return Loss(float(total), tokens)


def evicted(store: OrderedStore | TieredStore, row: int, held: Stored) -> Tensor | None:
    """Which tokens of a row are neither in a tier nor in the exact window, bool `[kv_heads, T]`; None where none is."""
    length = store.sequences.lengths[row]
    if isinstance(store, OrderedStore) or store.sequences.kept(row, length) == length:
        return None
    sinks, exact = store.sequences.sinks, store.sequences.exact(row, length)
    gone = torch.zeros(held.positions.shape[0], length, dtype=torch.bool, device=held.positions.device)
    gone[:, sinks : length - exact + sinks] = True
    return gone.scatter_(1, held.positions, False)
