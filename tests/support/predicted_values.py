"""Values as codes of components plus a prediction from the codes of their keys: random tables, and the values in float64."""

from dataclasses import replace

import torch
from mixed_words import Words
from paged_attention import Pages
from sized_tokens import Sizes
from torch import Tensor

from calib.kernels.attend.operation import CodeFold, PredictedValues

CHANNELS, REACH = 24, 2**14


def predicted_values(
    values: Pages, own: Words, sizes: Sizes, keys: Pages, of_keys: Words, key_sizes: Sizes, beside: Tensor | float = 0
) -> tuple[Pages, CodeFold]:
    """Decode the sized components of `values` and add the prediction from the sized `keys`: the pages with their tokens in float64,
    and the `CodeFold` of the kernels. Values have `CHANNELS` channels to which all components contribute, and one more for each
    component of the keys, which depends on that one alone; all have about the same range. `beside` is added to s c."""
    draw = torch.Generator().manual_seed(11)
    heads, components, of_key = len(own.counts), len(own.levels()), len(of_keys.levels())
    wide, largest = CHANNELS + of_key, (of_keys.levels() - 1).float()
    axes = torch.randn(heads, components, wide, generator=draw) / own.levels()[:, None] * own.own().mT
    axes[..., CHANNELS:] = 0
    size = 2.0 ** torch.randint(-2, 2, (heads, 1, 1), generator=draw)
    origin, mean = (torch.randn(heads, 1, wide, generator=draw) for _ in range(2))
    shares = torch.randn(heads, of_key, CHANNELS, generator=draw).clamp_(-3, 3) / 4
    table = torch.cat([shares, torch.eye(of_key).expand(heads, -1, -1)], -1) * REACH / largest[:, None]
    table = (table * of_keys.own().mT).round().to(torch.int16)
    unit = 2.0 ** torch.randint(-1, 2, (heads, 1, wide), generator=draw) / REACH
    fold = CodeFold(axes.half(), size, origin, mean, PredictedValues(table, unit, largest))
    numbers = own.numbers(values.stream.pages).double() * sizes.sizes + beside
    told = (2 * of_keys.numbers(keys.stream.pages).double() - largest) * key_sizes.sizes
    tokens = size.double() * (numbers @ fold.axes.double()) + (origin - mean).double() * sizes.sizes + mean.double()
    tokens += unit.double() * (told @ table.double())
    return Pages(replace(values.stream, sizes=sizes.words), tokens), fold
