"""Codes of stored chunks for the profile "storage": one basis for all heads of a layer, each layer predicted from the one before.

Tensors `keys.storage` and `values.storage` (`calib/runtime/artifact/transform_tensors.py`), with L layers, W = kv_heads * head_dim:
`.mean [L, 1, W]`, `.basis [L, 1, W, W]`, `.steps [L, 1, W, 8]`, `.errors [L, 1, W, 9]`, `.matrix [L, 2 W or 3 W, W]`.

A layer is predicted from the decoded keys and values of the layer before, which depend on all layers before it. So codes are fitted
layer by layer on the same tokens, a sample that is held until the end of the fit. They are fitted with the price of a bit at which
a value takes `CODED` bits; other budgets use other widths with the same bases, as their decoded vectors differ little.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from calib.capture.reservoir import Reservoir
from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.rotation import Rotation
from calib.statistics.joint_codes import JointCodes, price_of
from calib.statistics.layer_samples import LayerSamples
from calib.statistics.transformed_streams import coded, unrotated

TOKENS = 12288  # of the sample
CODED = 1.5  # bits per key or value element at which codes are fitted
ROLES = ("keys", "values")


class StorageCodes(LayerSamples):
    """Per layer, a `Reservoir` of tokens with their keys before RoPE and values of all KV heads; codes are fitted at the end.

    A sequence's first tokens, which stay exact, are left out. Each layer's sample has 12,288 rows of 2 W numbers: 1.6 GB in all, in
    16 bits, for Llama 3 8B (32 layers, 8 KV heads of 128 channels).

    Args:
        shape: the model's sizes.
        seed: of the sample.
        dtype: of the sample: the model's.
        rotation: the model's RoPE.
        weigh: returns the weight of errors, float64 `[3, L, H, D, D]` for keys, values and keys before RoPE (`errors_weight` in
            `transform_basis.py`); called at the end, when the statistics that it reads are complete.
    """

    def __init__(
        self, shape: Shape, seed: int, dtype: torch.dtype, rotation: Rotation, weigh: Callable[[], Tensor]
    ) -> None:
        super().__init__()
        self.rotation, self.weigh, self.width = rotation, weigh, shape.kv_heads * shape.head_dim
        self.layers = nn.ModuleList(Reservoir(TOKENS, 2 * self.width, seed, dtype) for _ in range(shape.layers))

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's tokens to the sample; the same tokens are kept in every layer."""
        keys, kept = unrotated(sample.keys, sample.positions, self.rotation), coded(sample)
        rows = [x.transpose(1, 2)[kept].flatten(1) for x in (keys, sample.values.float())]
        self.layers[sample.layer].add(sample.index[kept], torch.cat(rows, -1))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the codes, fitted twice: at price 0 (most bits) to find the price of a bit, then at that price."""
        _, values, before = self.weigh()
        weights = torch.stack([before, values], 1)
        first = self._fitted(weights, 0.0)
        price = price_of([own for both in first for own in both], CODED * 2 * len(self.layers) * self.width)
        found = dict[str, Tensor]()
        for role, streams in zip(ROLES, zip(*self._fitted(weights, price), strict=True), strict=True):
            found |= {
                f"{role}.storage.mean": torch.stack([own.mean[None] for own in streams]),
                f"{role}.storage.basis": torch.stack([own.rows for own in streams]),
                f"{role}.storage.steps": torch.stack([own.steps for own in streams]).float(),
                f"{role}.storage.errors": torch.stack([own.errors for own in streams]).float(),
                f"{role}.storage.matrix": torch.stack([self._padded(own.matrix, role) for own in streams]),
            }
        return found

    def _fitted(self, weights: Tensor, price: float) -> list[tuple[JointCodes, JointCodes]]:
        """Returns the codes of keys and values by layer, each predicted from vectors decoded at this price of a bit."""
        found, told = list[tuple[JointCodes, JointCodes]](), None
        for layer, weight in zip(self.layers, weights, strict=True):
            rows = layer.sample().cpu().float()
            rows = rows if len(rows) else rows.new_zeros(1, 2 * self.width)  # a layer that nothing reached
            both = list[JointCodes]()
            known = rows[:, :0] if told is None or len(told) != len(rows) else told
            for x, of_heads in zip(rows.chunk(2, -1), weight, strict=True):
                both.append(JointCodes.fitted(x, known, torch.block_diag(*of_heads)[None], price))
                known = torch.cat([known, both[-1].decoded(x, known)], -1)
            told = known[:, -2 * self.width :]
            found.append((both[0], both[1]))
        return found

    def _padded(self, matrix: Tensor, role: str) -> Tensor:
        """Returns `matrix` with zero rows for predictors that do not exist, as in the first layer."""
        rows = (2 if role == "keys" else 3) * self.width
        return torch.cat([matrix.new_zeros(rows - len(matrix), self.width), matrix])
