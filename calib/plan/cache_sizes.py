"""The size of every method's cache at a batch and a context: the runtime's own prediction, of stores that hold no numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from calib.bench.largest_batch import MEASURED, Law
from calib.plan.meta_model import MetaModel
from calib.plan.meta_tensors import META, MetaTensors
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods import METHODS, Geometry, build
from calib.runtime.offload.store import OffloadStore
from calib.runtime.rotation import Rotation
from calib.runtime.store import Footprint, LayerContext, Plan


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache.

    Attributes:
        device: all that lies on the device, tables of the artifact and layers that stay uncompressed included.
        host: pages in host memory.
        refused: why the method cannot serve this model; None where it can.
    """

    device: int = 0
    host: int = 0
    refused: str | None = None

    def content(self, values: int) -> dict[str, Any]:
        """As plain JSON; `values` keys and values of all layers in it."""
        if self.refused is not None:
            return {"refused": self.refused}
        return {"device_bytes": self.device, "host_bytes": self.host, "bits_per_value": 8 * self.device / values}


def cache_sizes(meta_model: MetaModel, artifact: Artifact, batch: int, context: int) -> dict[str, Any]:
    """Every method's at its default options, given this artifact; `exact` is the cache of transformers in 16 bits."""
    shape = meta_model.shape
    values = batch * 2 * shape.kv_heads * shape.head_dim * context * shape.layers
    sizes = {name: cache_size(meta_model, name, {}, artifact, batch, context).content(values) for name in METHODS}
    return {"batch": batch, "context": context, "values": values, "exact_16_bit_bytes": 2 * values, "methods": sizes}


def cache_size(
    meta_model: MetaModel,
    method: str,
    options: dict[str, Any],
    artifact: Artifact | None,
    batch: int,
    context: int,
    after: int = 0,
) -> CacheSize:
    """Of `batch` rows that each hold a prompt of `context` tokens, and so many `after` it."""
    try:
        built = build(method, options)
        plans = [built.plan(number, Geometry.of(meta_model.text), artifact) for number in meta_model.compressed]
        one, two = (predicted(meta_model, plans, rows, context, after) for rows in MEASURED)
    except ValueError as error:
        return CacheSize(refused=" ".join(str(error).split()))
    # Rows stand alone, so two batches give all.
    device, host = (Law.through(getattr(one, part), getattr(two, part)).at(batch) for part in ("device", "host"))
    return CacheSize(device, host)


def predicted(meta_model: MetaModel, plans: Sequence[Plan], batch: int, context: int, after: int = 0) -> CacheSize:
    """What `memory()` of a cache with such a prompt in it, and tokens after it, would predict, given the `plans` of the layers that
    are compressed: all take what the first does."""
    dtype, numbers, geometry = meta_model.model.dtype, meta_model.compressed, Geometry.of(meta_model.text)
    plan, windows = plans[0], [meta_model.windows[number] for number in numbers]
    plan.check(geometry.head_dim, dtype)
    remedy = plan.needs_rope
    rotation = None if remedy is None else Rotation.of(meta_model.model, remedy)
    shared = {id(table): table for one in plans for table in one.tables()}
    with torch.no_grad(), MetaTensors():
        sequences = plan.sequences(1, max((window for window in windows if window is not None), default=None))
        keys = torch.empty(batch, geometry.kv_heads, context + after, geometry.head_dim, dtype=dtype, device=META)
        store = plan.open(keys, keys, sequences, LayerContext(rotation=rotation))
        for step, new in enumerate(keys.split([context, *[after] * bool(after)], dim=2), 1):
            forward = sequences.begin(step, batch, new.shape[2], None)
            store.prepare(forward)
            store.store(forward, new, new)
            forward.stored()
        if after and isinstance(store, OffloadStore) and (most := store.fetchable(context + after - 1)):
            store.pool.fit(most, store.policy.entries)  # as a step does
        weight: Footprint = store.footprint()
    kinds = Counter({kind: len(numbers) * size for kind, size in weight.kinds.items()})
    kinds["tables"] += sum(table.nbytes for table in shared.values())
    kinds["tables"] += sum(table.predicted_bytes() for table in sequences.all_tables)
    kinds["tables"] += 0 if rotation is None else 8 * len(rotation.frequencies)
    others = [number for number in range(len(meta_model.windows)) if number not in numbers]
    kinds["uncompressed"] += exact_bytes(meta_model, others, batch, context + after)
    return CacheSize(kinds.total(), len(numbers) * weight.host)


def exact_bytes(meta_model: MetaModel, layers: Iterable[int], batch: int, context: int) -> int:
    """Of a `DynamicCache` for some layers: all tokens, of a layer that slides those that it still sees."""
    geometry = Geometry.of(meta_model.text)
    token = 2 * batch * geometry.kv_heads * geometry.head_dim * meta_model.model.dtype.itemsize
    windows = (meta_model.windows[number] for number in layers)
    return token * sum(context if window is None else min(context, window - 1) for window in windows)
