"""The initial dictionary: centroids of k-means, scaled to unit length (CSR, arXiv:2412.11741, Algorithm 1, line 12).

Mini-batch k-means (Sculley, WWW 2010): a centroid is the mean of all vectors assigned to it so far, each when its batch was
processed. The samples are read a few times in a seeded order. All tensors stay on the samples' device.
"""

import torch
from torch import Generator, Tensor

from calib.kernels.neural_dict.operation import scattered

PASSES = 3
BATCH = 4096  # vectors; more where there are more centroids, so that a batch has four for each
TILE_ELEMENTS = 2**24  # distances in memory at once


def centroids(samples: Tensor, count: int, draw: Generator) -> Tensor:
    """Returns `count` unit rows `[count, d]` for `samples [V, d]` (float32, V >= count); `draw` is a CPU generator.

    A centroid without vectors in a pass restarts at one of the vectors of the last batch farthest from their centroids.
    """
    centres = samples[shuffled(samples, draw)[:count]]
    seen = samples.new_zeros(count, dtype=torch.int64)
    batches = max(1, len(samples) // max(BATCH, 4 * count))
    for _ in range(PASSES):
        before = seen.clone()
        for part in shuffled(samples, draw).tensor_split(batches):
            batch = samples[part]
            distance, nearest = nearest_centres(batch, centres)
            found = seen.new_zeros(count).index_add_(0, nearest, torch.ones_like(nearest))
            seen += found
            summed = scattered(torch.ones_like(distance)[:, None], nearest[:, None], batch, count)
            centres = centres + (summed - found[:, None] * centres) / seen.clamp(min=1)[:, None]
        empty = (seen == before).nonzero()[:, 0]
        farthest = distance.topk(min(len(empty), len(batch))).indices
        centres[empty[: len(farthest)]] = batch[farthest]
        seen[empty] = 0
    return unit_rows(centres, draw)


def nearest_centres(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the squared distance `[V]` of each row of `x [V, d]` to the nearest of `centres [N, d]`, and its index int64
    `[V]`."""
    lengths, found = centres.square().sum(1), []
    for rows in x.split(max(1, TILE_ELEMENTS // len(centres))):
        found.append(torch.addmm(lengths, rows, centres.mT, alpha=-2).min(1))
    distance, position = (torch.cat(parts) for parts in zip(*found, strict=True))
    return distance + x.square().sum(1), position


def shuffled(samples: Tensor, draw: Generator) -> Tensor:
    """Returns a random order of the samples, the same on every device."""
    return torch.randperm(len(samples), generator=draw).to(samples.device)


def unit_rows(rows: Tensor, draw: Generator | None = None) -> Tensor:
    """Returns `rows [N, d]` scaled to length 1 (ReNorm, eq. 9); rows of zeros get a random direction if `draw` is given."""
    if draw is not None:
        zero = (rows == 0).all(1, keepdim=True)
        rows = torch.where(zero, torch.randn(rows.shape, generator=draw, dtype=torch.float32).to(rows), rows)
    return torch.nn.functional.normalize(rows, dim=1)
