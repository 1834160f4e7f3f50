"""The size of every method's cache for a batch and a context: the runtime's own stores are filled on the `meta` device."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from calib.bench.largest_batch import MEASURED, Law
from calib.plan.meta_model import MetaModel
from calib.plan.meta_tensors import META, MetaTensors
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods import METHODS, Geometry, build, check_rope
from calib.runtime.offload.store import OffloadStore
from calib.runtime.rotation import Rotation
from calib.runtime.store import Footprint, LayerContext, Plan


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache.

    Attributes:
        device: bytes on the device, including the artifact's tables and the layers that stay uncompressed.
        host: bytes of pages in host memory.
        refused: why the method cannot serve this model; None if it can.
    """

    device: int = 0
    host: int = 0
    refused: str | None = None

    def content(self, values: int) -> dict[str, Any]:
        """Returns the size as plain JSON; `values` is the number of key and value elements of all layers in the cache."""
        if self.refused is not None:
            return {"refused": self.refused}
        return {"device_bytes": self.device, "host_bytes": self.host, "bits_per_value": 8 * self.device / values}


def cache_sizes(meta_model: MetaModel, artifact: Artifact, batch: int, context: int) -> dict[str, Any]:
    """Sizes of every method's cache at its default options with this artifact; `exact_16_bit_bytes` is a 16-bit `DynamicCache`."""
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
    """Size of a cache of `batch` rows, each with a prompt of `context` tokens and `after` tokens stored after it."""
    try:
        built = build(method, options)
        check_rope(method, meta_model.model)
        plans = [built.plan(number, Geometry.of(meta_model.text), artifact) for number in meta_model.compressed]
        one, two = (predicted(meta_model, plans, rows, context, after) for rows in MEASURED)
    except ValueError as error:
        return CacheSize(refused=" ".join(str(error).split()))
    # The size is linear in the batch, so two batch sizes determine it for every batch.
    device, host = (Law.through(getattr(one, part), getattr(two, part)).at(batch) for part in ("device", "host"))
    return CacheSize(device, host)


def predicted(meta_model: MetaModel, plans: Sequence[Plan], batch: int, context: int, after: int = 0) -> CacheSize:
    """Size that the `memory()` report of a cache with such a prompt, and `after` tokens after it, would give.

    `plans` are those of the compressed layers; each of these layers is assumed to need as much as the first one.
    """
    dtype, numbers, geometry = meta_model.model.dtype, meta_model.compressed, Geometry.of(meta_model.text)
    plan, windows = plans[0], [meta_model.windows[number] for number in numbers]
    plan.check(geometry.head_dim, dtype)
    remedy = plan.needs_rope
    rotation = None if remedy is None else Rotation.of(meta_model.model, remedy)
    # Moved as a cache's are: each layer has copies of its own of all tables but the `SharedTable`s.
    shared = {id(table): table for one in [one.to(META) for one in plans] for table in one.tables()}
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
    """Bytes of a `DynamicCache` for some layers: all tokens, or the last window - 1 tokens of a sliding-window layer."""
    geometry = Geometry.of(meta_model.text)
    token = 2 * batch * geometry.kv_heads * geometry.head_dim * meta_model.model.dtype.itemsize
    windows = (meta_model.windows[number] for number in layers)
    return token * sum(context if window is None else min(context, window - 1) for window in windows)
