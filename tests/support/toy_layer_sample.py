"""Random layer samples, in the form in which a capture of a model's forward gives them."""

import torch

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=32)


def sample(batch=2, tokens=64, layer=0, seed=0, padding=(), window=None, softcap=None, spread=1.0) -> LayerSample:
    """Random tokens; `spread` is the deviation of the logarithms of channels' sizes, `padding[row]` the padding of a row."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads):
        x = torch.randn(batch, heads, tokens, 32, generator=generator)
        return x * torch.exp(spread * torch.randn(heads, 1, 32, generator=generator))

    mask = torch.ones(batch, tokens, dtype=torch.bool)
    for row, count in enumerate(padding):
        mask[row, :count] = False
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    index = torch.arange(batch * tokens).view(batch, tokens) + 1000 * seed
    return LayerSample(
        layer, tensor(4), tensor(2), tensor(2), tensor(2), mask, positions, index, 32**-0.5, softcap, window
    )


def rows_of(one: LayerSample, rows: slice, tokens: slice = slice(None)) -> LayerSample:
    return LayerSample(
        one.layer,
        one.queries[rows, :, tokens],
        one.keys[rows, :, tokens],
        None,
        one.values[rows, :, tokens],
        one.mask[rows, tokens],
        one.positions[rows, tokens],
        one.index[rows, tokens],
        one.scaling,
        one.softcap,
        one.window,
    )
