"""Random bases, codecs of their components, tokens to encode, and predictions from codes."""

import torch
from trellis_inputs import weights_of

from calib.runtime.stages.codec import MixedQuant
from calib.runtime.stages.codec.sized import Sized
from calib.runtime.stages.codec.trellis import TrellisQuant
from calib.runtime.stages.prediction import Prediction
from calib.runtime.stages.transform.basis import ENTRY, Basis


def basis_of(widths, counts, channels, seed=0):
    """A random basis, with some entries of the largest size, and 0 for components for which a head has no word."""
    draw = torch.Generator().manual_seed(seed)
    codec = MixedQuant(widths, counts)
    into = torch.randn(len(counts), channels, codec.components, generator=draw, dtype=torch.float64) * 0.3
    into *= (weights_of(widths, counts) > 0)[:, None]
    mean = torch.randn(len(counts), channels, generator=draw)
    spread = torch.rand(len(counts), channels, generator=draw) * 2.0 ** torch.randint(
        -9, 9, (channels,), generator=draw
    )
    cpu = torch.device("cpu")
    found = Basis.of(mean, into, into.mT, spread, codec.step(cpu), codec.least(cpu))
    found.into[:, 0, 0], found.into[:, 1, 0], found.into[:, -1, 0] = ENTRY, ENTRY - 256, -ENTRY
    return found


def codecs(widths, counts):
    """Codecs by name: uniform codes and trellis-coded levels, each without and with token sizes."""
    weights = weights_of(widths, counts).unsqueeze(1)
    plain = MixedQuant(widths, counts), TrellisQuant(widths, counts, weights)
    return {
        "uniform": plain[0],
        "trellis": plain[1],
        "sized": Sized(plain[0], weights),
        "sized trellis": Sized(plain[1], weights),
    }


def tokens_of(basis, count, dtype, rows=2, seed=1):
    """Random tokens `[rows, heads, count, channels]` at many distances from the mean; every fifth is the mean itself."""
    heads, channels = basis.mean.shape[0], basis.mean.shape[-1]
    draw = torch.Generator().manual_seed(seed)
    lengths = 2.0 ** torch.randint(-12, 8, (rows, heads, count, 1), generator=draw)
    x = basis.mean + torch.randn(rows, heads, count, channels, generator=draw) * lengths * basis.unit * 2**16
    x[:, :, ::5] = basis.mean
    return x.clamp(-6e4, 6e4).to(dtype)


def prediction_of(widths, counts, channels):
    """A prediction with random entries, some of them the largest, and 0 for components for which a head has no word."""
    draw = torch.Generator().manual_seed(5)
    heads, components = len(counts), len(widths) * max(counts)
    table = torch.randint(-ENTRY, ENTRY + 1, (heads, components, channels), generator=draw)
    table[:, :2] = torch.tensor([[ENTRY], [-ENTRY]])[:components]
    table *= (weights_of(widths, counts) > 0)[..., None]
    unit = 2.0 ** torch.randint(-20, -8, (heads, 1, channels), generator=draw)
    return Prediction(table.to(torch.int16), unit)
