"""One compressed layer behind transformers' cache-layer contract.

`update` receives keys and values but no query, and whatever it returns reaches the attention function untouched; so it
keeps the new tokens and returns the layer itself. The registered attention function hands the query back to `attend`,
which attends (packed pages, window, new tokens) and then stores the new tokens, or holds them as drafts while past
recording is on. If the layer reaches any other attention function, that one fails at once: a layer is not a tensor.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from calib.runtime.attend import LayerAttention
from calib.runtime.pages import PAGE_TOKENS
from calib.runtime.reading import Logits
from calib.runtime.rows import Draft, Forward, Rows
from calib.runtime.stream import TILE_TOKENS, Stream, StreamPlan


class CompressedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, `[rows, kv_heads, tokens, head_dim]` in, packed pages and a window inside."""

    # For transformers: `crop` takes drafts back without a trace.
    is_croppable = True

    def __init__(self, keys: StreamPlan, values: StreamPlan, rows: Rows) -> None:
        super().__init__()
        # Copies: a plan's tables may be views of an artifact's tensors for all layers, and would keep those alive.
        self.plans, self.state = (keys.to(torch.device("cpu")), values.to(torch.device("cpu"))), rows
        self._clear()

    def _clear(self) -> None:
        self.streams: tuple[Stream, Stream] | None = None
        self.is_initialized = False
        self.seen = 0
        self.steps = 0
        self._arrived: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Fixes dtype, device, shapes and parameter width from the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.streams = (Stream("keys", self.plans[0], key_states), Stream("values", self.plans[1], value_states))
        self.plans = (self.streams[0].plan, self.streams[1].plan)  # on the device now, and only there
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Takes the new tokens and returns (self, self) for the attention function."""
        # Also where a first forward was refused before anything was stored: the next may have other rows.
        if not self.is_initialized or not self.steps:
            self.lazy_initialization(key_states, value_states)
        self._arrived = (key_states, value_states)
        return self, self

    def attend(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        """Attention of `query [rows, heads, n, D]` over everything held and the n new tokens; then stores these.

        `mask` is the 2-D padding mask or None. Padded queries get zeros. Returns `[rows, heads, n, D]`.
        """
        assert self._arrived is not None and self.streams is not None, "attention without update"
        (new_keys, new_values), self._arrived = self._arrived, None
        self._check_window(logits.sliding)
        forward = self.state.begin(self.steps + 1, query.shape[0], query.shape[2], mask)
        self.steps += 1
        if forward.recorded:
            output = self._attended(forward, query, new_keys, new_values, logits)
            forward.hold(Draft(self._take_in, new_keys.detach().clone(), new_values.detach().clone()))
        else:
            self._prepare(forward)  # before attention: the table already names the pages this forward will fill
            output = self._attended(forward, query, new_keys, new_values, logits)
            self._store(forward, new_keys, new_values)
        self.seen += query.shape[2]
        return output

    def _check_window(self, asked: int | None) -> None:
        kept = self.state.sliding
        if kept is not None and (asked is None or asked > kept):
            raise ValueError(
                f"this layer attends {'to everything' if asked is None else f'{asked} tokens back'}, and the cache keeps "
                f"the {kept} tokens of the configuration's sliding_window; set that to the largest window of any layer"
            )

    def _take_in(self, forward: Forward, new_keys: Tensor, new_values: Tensor) -> None:
        self._prepare(forward)
        self._store(forward, new_keys, new_values)

    def _prepare(self, forward: Forward) -> None:
        for stream in self.streams or ():
            stream.prepare(forward, self.state.table)

    def _attended(
        self, forward: Forward, query: Tensor, new_keys: Tensor, new_values: Tensor, logits: Logits
    ) -> Tensor:
        assert self.streams is not None
        # Rows with padding in this forward go one by one, without it; the others together, as many as fill a tile.
        batch, step = query.shape[0], 1 if forward.columns is not None else TILE_TOKENS // PAGE_TOKENS
        if forward.columns is None and batch <= step:
            return LayerAttention(*self.streams, self.state, forward, range(batch), logits).output(
                query, new_keys, new_values
            )
        parts = []
        for at in range(0, batch, step):
            rows = range(at, min(at + step, batch))
            q, k, v = (tensor[rows.start : rows.stop] for tensor in (query, new_keys, new_values))
            layer = LayerAttention(*self.streams, self.state, forward, rows, logits)
            if forward.columns is None:
                parts.append(layer.output(q, k, v))
                continue
            columns, output = forward.columns[at].to(query.device), q.new_zeros(*q.shape[:3], v.shape[3])
            if forward.counts[at]:
                output[:, :, columns] = layer.output(q[:, :, columns], k[:, :, columns], v[:, :, columns])
            parts.append(output)
        return torch.cat(parts)

    def _store(self, forward: Forward, new_keys: Tensor, new_values: Tensor) -> None:
        assert self.streams is not None
        table = self.state.table
        # Detached: outside torch.no_grad() a stored token would keep the graph of every forward alive.
        for stream, new in zip(self.streams, (new_keys.detach(), new_values.detach()), strict=True):
            if forward.width == 1 and forward.columns is None:
                stream.store_step(forward, table, new)
                continue
            slots = stream.plan.schedule.slots
            stream.window.resize(max(map(slots, forward.before + forward.after)))
            for rows in forward.alike:
                tokens = (
                    new[rows] if forward.columns is None else new[rows][:, :, forward.columns[rows[0]].to(new.device)]
                )
                stream.store_run(rows, forward, table, tokens)
            stream.window.resize(max(map(slots, forward.after)))
        forward.stored()

    if not TYPE_CHECKING:  # mypy goes on refusing misspelt attributes

        def __getattr__(self, name: str) -> Any:
            # Reached for what a layer does not have: a model that treats what `update` returned as a tensor.
            raise AttributeError(
                f"a compressed layer is no tensor and has no {name!r}: this model, or an attention function that is not ours, "
                "works on keys and values behind the cache's back; is the cache released, or the model unsupported?"
            )

    def get_seq_length(self) -> int:
        """Columns seen, padding included: what transformers counts positions and masks by."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns: (seen + query_length, 0)."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def reset(self) -> None:
        """Forgets everything."""
        self._clear()

    @property
    def record_past(self) -> bool:
        """Whether the tokens of a forward wait for `crop`, as transformers calls it; all layers share the answer."""
        return self.state.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.state.recording = recording

    def activate_past_recording(self) -> None:
        """From now on the last forward's tokens stay exact and can be taken back, until `crop` or the next forward."""
        self.record_past = True

    def to(self, device: torch.device) -> None:
        """Moves what is stored, and the tables of the stages."""
        if self.streams is None:
            return
        for stream in self.streams:
            stream.to(device)
        self.plans, self.device = (self.streams[0].plan, self.streams[1].plan), device

    def permute(self, sources: Tensor, kept: list[int] | None) -> None:
        """Row i becomes a copy of row `sources[i]` (int64 `[rows]`): windows are copied, pages shared by the table.

        `kept` are the pages that stay, where the table numbered them anew.
        """
        for stream in self.streams or ():
            stream.window.permute(sources.to(stream.window.tokens.device))
            stream.window.resize(max(map(stream.plan.schedule.slots, self.state.lengths), default=0))
            if kept is not None:
                stream.pool.keep(kept)
