"""The bytes of a whole cache: its compressed layers, the tables, and the layers that stay as transformers makes them."""

from collections import Counter
from collections.abc import Sequence

from transformers.cache_utils import CacheLayerMixin

from calib.runtime import layer_beside
from calib.runtime.layer import CompressedLayer
from calib.runtime.memory import KINDS, Memory, measure
from calib.runtime.paging.sequence_state import SequenceState


def memory_of(layers: Sequence[CacheLayerMixin], sequences: SequenceState) -> Memory:
    """Bytes of these layers, predicted and measured, as `CompressedCache.memory` returns them."""
    compressed = [layer for layer in layers if isinstance(layer, CompressedLayer)]
    others = [layer for layer in layers if not isinstance(layer, CompressedLayer)]
    stores = [layer.store for layer in compressed if layer.store is not None]
    kinds, values, marginal, exact = Counter(dict.fromkeys(KINDS, 0)), 0.0, 0.0, 0
    for layer in compressed:
        if layer.store is not None:
            weight = layer.store.footprint()
            kinds.update(weight.kinds)
            marginal, values = marginal + weight.marginal, values + weight.values
            exact += weight.values * layer.dtype.itemsize  # a token's bytes in the model's dtype
    kinds["tables"] += tables_bytes(compressed, sequences)
    kinds["uncompressed"] = sum(
        part.numel() * part.element_size() for layer in others for part in layer_beside.kept(layer)
    )
    on_host = measure([store.on_host() for store in stores])
    measured, seen = measure(layers) - on_host, values * sum(sequences.seen)
    return Memory(
        predicted_bytes=sum(kinds.values()),
        measured_bytes=measured,
        host_bytes=on_host,
        by_kind=dict(kinds),
        bits_per_value=8 * measured / seen if seen else 0.0,
        marginal_bits=8 * marginal / values if values else 0.0,
        compressed_layers=len(compressed),
        layers=len(layers),
        dynamic_bytes=exact * sum(dynamic_tokens(sequences)) + kinds["uncompressed"],
        tokens=sum(sequences.seen),
        encoded_tokens=sum(sequences.encoded(row, length) for row, length in enumerate(sequences.lengths)),
        overflowed_outliers=sum(store.overflowed_outliers() for store in stores),
    )


def tables_bytes(compressed: Sequence[CompressedLayer], sequences: SequenceState) -> int:
    """Bytes of the artifact's tables, of the page tables on devices and of RoPE's frequencies; shared ones count once."""
    shared = {id(table): table for layer in compressed for table in layer.plan.tables()}
    rotation = compressed[0].context.rotation  # shared by all layers
    return (
        sum(table.numel() * table.element_size() for table in shared.values())
        + sum(table.predicted_bytes() for table in sequences.all_tables)
        + (0 if rotation is None else 8 * len(rotation.frequencies))
    )


def dynamic_tokens(sequences: SequenceState) -> list[int]:
    """How many tokens of each row a `DynamicCache` would hold; with a sliding window one fewer than the window at most."""
    if sequences.sliding is None:
        return sequences.seen
    return [min(seen, sequences.sliding - 1) for seen in sequences.seen]
