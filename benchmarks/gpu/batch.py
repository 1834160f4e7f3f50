"""Measures the largest batch of 32k tokens that fits beside an 8B model's weights, against 16 bits, and compares its bytes with
the predicted ones.

The model has `part` times as many layers as are filled here, so these get one `part`-th of the memory: the batch is that of the
whole model.
"""

import torch

from benchmarks.gpu.bench import Bench, Measured, NotMeasured
from benchmarks.gpu.decode_attention import TIERS
from benchmarks.gpu.inputs import queries
from benchmarks.gpu.layers import Heads, prompt_of
from benchmarks.gpu.model import tidy
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits
from calib.runtime.memory import measure
from calib.runtime.methods import Geometry, build
from calib.runtime.store import LayerContext

WEIGHTS = 16 << 30  # bytes of 8 billion parameters in 16 bits
SPARED = 0.9  # share of the remaining memory for the caches; the rest is for activations
TRIES = 4


@torch.no_grad()
def largest(bench: Bench) -> Measured:
    """Returns the figures "batch" (rows with compression over rows in 16 bits) and "bytes" (|measured / predicted - 1|)."""
    bench.needs_kernel("quantise")
    size = bench.sizes
    per_row = 2 * size.layers * size.kv_heads * size.tokens * size.head_dim * bench.dtype.itemsize
    room = 7 * per_row
    if bench.on_gpu:
        tidy(bench)
        room = int(SPARED * (torch.cuda.get_device_properties(bench.device).total_memory - WEIGHTS) / size.part)
    exact = room // per_row
    if not exact:
        raise NotMeasured("the memory does not hold one row in 16 bits")
    few = held(bench, filled(bench, 2))
    rows = int(room / (few["measured"] / 2))
    for _ in range(TRIES):
        found = held(bench, filled(bench, rows))
        if found["measured"] <= room:
            break
        rows -= 1 + rows // 50
    else:
        raise NotMeasured(f"{rows} rows do not fit, though {few['measured'] / 2:.0f} bytes a row would")
    apart = abs(found["measured"] / found["predicted"] - 1)
    details = {"room_bytes": room, "rows": rows, "rows_16_bit": exact, **found, "method": "zipcache", "options": TIERS}
    return Measured({"batch": [rows / exact] * 3, "bytes": [apart] * 3}, details)


def filled(bench: Bench, rows: int) -> list[CompressedLayer]:
    """Returns layers of one cache, each filled with a prompt; the prompts themselves are freed."""
    size = bench.sizes
    heads = Heads(rows, size.kv_heads, size.kv_heads, size.head_dim)  # queries are not stored: as few heads as possible
    method, geometry = build("zipcache", TIERS), Geometry(size.layers, size.kv_heads, size.head_dim)
    plans = [method.plan(number, geometry, None) for number in range(size.layers)]
    state = plans[0].sequences(size.layers, None)
    layers = [CompressedLayer(plan, state, LayerContext(number)) for number, plan in enumerate(plans)]
    for number, layer in enumerate(layers):
        keys, values = prompt_of(bench, heads, number)
        layer.update(keys, values)
        layer.attend(queries(keys, heads.heads, size.tokens, number), None, Logits(size.head_dim**-0.5))
    return layers


def held(bench: Bench, layers: list[CompressedLayer]) -> dict[str, int]:
    """Returns the bytes of the layers with their tables: measured over their tensors, predicted from shapes, and allocated."""
    state = layers[0].sequences
    predicted = sum(table.predicted_bytes() for table in state.all_tables)
    for layer in layers:
        assert layer.store is not None
        predicted += sum(layer.store.footprint().kinds.values())
        predicted += sum(table.numel() * table.element_size() for table in layer.plan.tables())
    tidy(bench)
    found = {"measured": measure(layers), "predicted": predicted}
    if bench.on_gpu:
        found["allocated"] = torch.cuda.memory_allocated(bench.device)
    return found
