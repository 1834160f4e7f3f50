"""Estimation of a chunk's first position from its keys: with the right one, keys before RoPE are as small as in calibration.

A key that is unrotated by its own position has the directions in which keys vary; by another position it is rotated out of them.
With T and the components' variances v of the artifact (`klt`'s basis of keys before RoPE, all its D components),

    y = T (R(-t) k - mean)        s = sqrt(mean_j y_j^2 / v_j)        score = mean of log2 s

over tokens, heads and layers: the octaves by which keys are larger than in calibration. RoPE does not change lengths, so the
candidate with the least score has the greatest likelihood for Gaussian keys with a scale for each token; no token counts more than
another.

On SmolLM2 135M, text unlike its calibration's and 32 candidates, multiples of 256 (`benchmarks/storage_reuse.py`): the right start
scores at most .3 octaves (.96 where the chunk is the first token alone), at least .4 less than any other, and 1.5 less from four
tokens on. A start that is wrong by one position scores .4 and more, which `LIMIT` does not detect. Two wrong ones are within .2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.components import LEAST_DEVIATION
from calib.runtime.rotation import Rotation

MOST_LAYERS, MOST_TOKENS = 8, 64  # the most that are used, evenly spread
MARGIN = 0.25  # octaves by which the second best candidate must be worse
LIMIT = 1.0  # octaves: if the best score is above, no candidate fits


@dataclass(frozen=True, eq=False)
class StartFinder:
    """Computes scores of candidates for the first position of a chunk.

    Args:
        layers: numbers of the n layers that are used.
        means: float32 `[n, kv_heads, 1, D]`.
        whitened: T over the components' deviations, transposed: float32 `[n, kv_heads, D, components]`.
        rotation: the model's RoPE.
    """

    layers: list[int]
    means: Tensor
    whitened: Tensor
    rotation: Rotation

    @classmethod
    def of(cls, artifact: Artifact, heads: range, rotation: Rotation) -> "StartFinder":
        """For chunks of these KV heads."""
        layers = evenly(artifact.fingerprint["layers"], MOST_LAYERS)
        mean, basis, errors = (
            artifact.tensor(f"keys.klt.before.{kind}")[layers][:, heads.start : heads.stop].double()
            for kind in ("mean", "basis", "errors")
        )
        deviation = errors[..., :1].sqrt()
        # A component without variance in the corpus does not count.
        rows = torch.where(deviation > 0, basis / deviation.clamp(min=LEAST_DEVIATION), 0)
        return cls(layers, mean.float()[:, :, None], rows.mT.float().contiguous(), rotation)

    def scores(self, keys: Tensor, candidates: Sequence[int]) -> list[float]:
        """The score of each candidate for the position of the first token of `keys [layers, tokens, kv_heads * D]`, in octaves."""
        heads, channels = self.whitened.shape[1:3]
        tokens = evenly(keys.shape[1], MOST_TOKENS)
        looked = keys[self.layers][:, tokens].cpu().float().unflatten(-1, (heads, channels)).transpose(1, 2)
        offsets, found = torch.tensor(tokens), []
        for candidate in candidates:
            cos, sin = self.rotation.at(offsets + candidate)
            components = (Rotation.rotated(looked, cos, -sin) - self.means) @ self.whitened
            power = components.square_().mean(-1).clamp_(min=torch.finfo(torch.float32).tiny)
            found.append(float(power.log2_().double().mean()) / 2)
        return found

    def start_of(self, keys: Tensor, candidates: Sequence[int]) -> int:
        """The candidate with the least score; raises ValueError if that is above `LIMIT`, or the next is not worse by `MARGIN`."""
        scores = self.scores(keys, candidates)
        ranked = sorted(range(len(scores)), key=scores.__getitem__)
        best = ranked[0]
        if not scores[best] <= LIMIT:
            raise ValueError(
                f"no candidate fits these keys: the best, {candidates[best]}, has a score of {scores[best]:.2f} octaves, expected "
                f"at most {LIMIT:g}; give the position"
            )
        if len(ranked) > 1 and not scores[ranked[1]] - scores[best] >= MARGIN:
            raise ValueError(
                f"candidates {candidates[best]} and {candidates[ranked[1]]} fit these keys nearly alike, {scores[best]:.3f} and "
                f"{scores[ranked[1]]:.3f} octaves, expected {MARGIN:g} between them; give the position"
            )
        return candidates[best]


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 ... `count` - 1, evenly spread, the first and the last included."""
    if count <= most:
        return list(range(count))
    return [index * (count - 1) // (most - 1) for index in range(most)]
