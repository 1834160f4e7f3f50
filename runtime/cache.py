"""The cache that `model.generate(past_key_values=...)` fills: transformers' contract over compressed layers."""

import weakref
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from calib.runtime.layer import CompressedLayer
from calib.runtime.memory import Memory, measure
from calib.runtime.pages import PAGE_TOKENS
from calib.runtime.rows import Rows
from calib.runtime.window import allocated


class CompressedCache(Cache):
    """Compressed attention layers, and the model's own sliding layers beside them where it mixes both.

    Made by `compress`; `release()` (or leaving its `with`) gives the model its own attention back. The cache keeps no
    reference to the model.
    """

    def __init__(
        self, layers: list[CacheLayerMixin], rows: Rows, method: str, seed: int, release: Callable[[], None]
    ) -> None:
        super().__init__(layers=layers)
        self.rows, self.method, self.seed = rows, method, seed
        # Also when the cache is dropped without a word: a model must not be left with our attention.
        self._release = weakref.finalize(self, release)

    def release(self) -> None:
        """Detaches the cache from its model, which is then exactly as before; what was stored can still be measured."""
        self._release()

    def __enter__(self) -> "CompressedCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that this cache compresses."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def is_croppable(self) -> bool:
        """False: an encoded token cannot be taken back, so speculative decoding is refused by transformers."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Only crop(0), which removes nothing."""
        if tokens_to_remove:
            raise ValueError(
                f"cannot remove {abs(tokens_to_remove)} tokens: encoded tokens cannot be taken back; decode without drafts"
            )

    def reset(self) -> None:
        """Forgets every token; the cache can be used again, for any batch."""
        super().reset()
        self.rows.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]`: windows are copied, pages shared until one is written."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, in place."""
        self.batch_select_indices(torch.arange(len(self.rows.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, in that order."""
        self.rows.permute(indices.tolist())
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.permute(indices)
            else:
                layer.batch_select_indices(indices)

    def memory(self) -> Memory:
        """What the cache weighs now; `predicted_bytes` comes from shapes, `measured_bytes` from the tensors' storage."""
        kinds = dict.fromkeys(("codes", "parameters", "exact", "window", "tables", "uncompressed"), 0)
        values = marginal = 0.0
        for layer in self.compressed:
            tables = [table for plan in layer.plans for table in plan.tables()]
            kinds["tables"] += sum(table.numel() * table.element_size() for table in tables)
            for stream in layer.streams or ():
                pool = stream.pool
                for field in pool.fields.values():
                    page_tokens = self.rows.table.capacity * PAGE_TOKENS * pool.kv_heads
                    kinds[field.kind] += round(page_tokens * field.bytes_per_token())
                    marginal += pool.kv_heads * field.bytes_per_token()
                slots = max(map(stream.plan.schedule.slots, self.rows.lengths), default=0)
                size = len(self.rows.lengths) * pool.kv_heads * stream.head_dim * layer.dtype.itemsize
                kinds["window"] += allocated(slots, stream.plan.schedule.window()) * size
                values += pool.kv_heads * stream.head_dim
        kinds["tables"] += self.rows.table.predicted_bytes()
        others = [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]
        kinds["uncompressed"] = sum(
            2 * layer.keys.numel() * layer.keys.element_size()
            for layer in others
            if getattr(layer, "keys", None) is not None
        )
        measured, seen = measure(self.layers), values * sum(self.rows.lengths)
        return Memory(
            predicted_bytes=sum(kinds.values()),
            measured_bytes=measured,
            host_bytes=0,
            by_kind=kinds,
            bits_per_value=8 * measured / seen if seen else 0.0,
            marginal_bits=8 * marginal / values if values else 0.0,
        )
