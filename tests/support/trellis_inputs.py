"""Components for trellis-coded levels of every width, and the weights of their errors."""

import torch

# (widths of a word's fields, words of each head): every width, alone and mixed; heads with fewer words than others, or none.
PATTERNS = [
    *(((width,) * (16 // width), (3, 3)) for width in range(1, 9)),
    ((5, 4, 3, 2, 1, 1), (2, 0, 1)), ((4, 4, 3, 2, 2, 1), (7, 5)), ((8, 8), (3, 1, 2)), ((8,), (1, 4, 3)), ((7, 5, 4), (2, 3, 1)),
]  # fmt: skip


def components(widths, counts, batch=2, tokens=37, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, len(counts), tokens, len(widths) * max(counts), generator=draw)


def weights_of(widths, counts, seed=1):
    weights = torch.rand(len(counts), len(widths) * max(counts), generator=torch.Generator().manual_seed(seed))
    for own, count in zip(weights, counts, strict=True):
        own.view(len(widths), -1)[:, count:] = 0
    return weights
