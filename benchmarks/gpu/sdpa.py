"""The baseline of attention over a full cache: torch's SDPA with the fastest of its backends on this device."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.bench import Bench, NotMeasured
from benchmarks.gpu.turns import milliseconds

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attends one query token per row, with the query heads of a KV head as the rows of one head, so that keys are read once."""
    rows = query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(rows, keys, values).flatten(1, 2).unsqueeze(2)


def by_heads(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> Tensor:
    """Attends with separate query heads (`enable_gqa`)."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query, keys, values, is_causal=causal, enable_gqa=query.shape[1] > keys.shape[1]
        )


def fastest_decode(
    bench: Bench, query: Tensor, keys: Tensor, values: Tensor
) -> tuple[str, Attention, dict[str, float]]:
    """Returns the name and function of the fastest way to attend `query [rows, heads, 1, D]`, and the milliseconds of all."""
    ways = {
        f"{name}, {form.__name__.replace('_', ' ')}": partial(form, backend)
        for name, backend in BACKENDS.items()
        for form in (grouped, by_heads)
    }
    return _fastest(bench, ways, query, keys, values)


def fastest_causal(
    bench: Bench, query: Tensor, keys: Tensor, values: Tensor
) -> tuple[str, Attention, dict[str, float]]:
    """Returns the same for a causal prompt; on a GPU without "math", which forms the whole matrix."""
    usable = BACKENDS if not bench.on_gpu else {name: own for name, own in BACKENDS.items() if name != "math"}
    return _fastest(
        bench, {name: partial(by_heads, own, causal=True) for name, own in usable.items()}, query, keys, values
    )


@torch.no_grad()
def _fastest(
    bench: Bench, ways: Mapping[str, Attention], query: Tensor, keys: Tensor, values: Tensor
) -> tuple[str, Attention, dict[str, float]]:
    taken = {}
    for name, way in ways.items():
        try:
            way(query, keys, values)
        except RuntimeError:  # the backend does not support this device, dtype or shape
            continue
        taken[name] = sorted(milliseconds(bench, partial(way, query, keys, values)) for _ in range(5))[2]
    if not taken:
        raise NotMeasured("no backend of scaled_dot_product_attention runs here")
    best = min(taken, key=taken.__getitem__)
    return best, ways[best], {name: round(value, 4) for name, value in taken.items()}
