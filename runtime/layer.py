"""One compressed layer, as a transformers `CacheLayerMixin`.

`update` receives keys and values but no query, and whatever it returns reaches the attention function untouched; so it
keeps the new tokens and returns the layer itself. The registered attention function hands the query back to `attend`,
which attends (packed pages, window, new tokens) and then stores the new tokens, or holds them as drafts while past
recording is on. If the layer reaches any other attention function, that one fails at once: a layer is not a tensor.
"""

from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from calib.kernels.dispatch import OneChoice, prefers_triton
from calib.runtime.attend.request import QKV
from calib.runtime.files.state import State, StateError, branch, dtype_named, wholes
from calib.runtime.logits import Logits
from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.messages.printable import printable
from calib.runtime.modes import wants_gradients, with_ordinary_tensors, without_gradients
from calib.runtime.new_tokens import attended_and_stored, attended_unstored, in_chunks, stored
from calib.runtime.paging.forward import Draft, Forward
from calib.runtime.paging.page_numbers import PAGE_TOKENS
from calib.runtime.paging.pages import TILE_TOKENS
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.store import LayerContext, Plan, Store

_AS_IT_IS = nullcontext()

NO_TENSOR = (
    "the model, or an attention function other than calib's, uses keys and values that `update` returns as tensors: the cache was "
    "released, or the model is not supported"
)


class CompressedLayer(CacheLayerMixin):
    """Keys and values of one attention layer: takes `[rows, kv_heads, tokens, head_dim]`, keeps packed pages and an exact
    window."""

    # For transformers: `crop` removes drafts completely, and get_mask_sizes counts every column.
    is_croppable = True
    is_sliding = False

    def __init__(self, plan: Plan, sequences: SequenceState, context: LayerContext) -> None:
        super().__init__()
        # A copy: a plan's tables may be views of an artifact's tensors for all layers, and would keep those alive.
        self.plan, self.sequences, self.context = plan.to(torch.device("cpu")), sequences, context
        self._clear()

    def _clear(self) -> None:
        self.store: Store | None = None
        self.is_initialized = False
        self.seen = 0
        self.steps = 0
        self._arrived: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Fixes dtype, device, shapes and parameter width from the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.shapes = {"keys": list(key_states.shape), "values": list(value_states.shape)}
        self.store = self.plan.open(key_states, value_states, self.sequences, self.context)
        self.plan = self.store.plan  # on the device now, and only there
        self.is_initialized = True

    @with_ordinary_tensors
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Takes the new tokens and returns (self, self) for the attention function."""
        if value_states.dtype.itemsize < key_states.dtype.itemsize:
            value_states = value_states.to(key_states.dtype)  # torch.autocast: RoPE makes keys float32, not values
        # Also after a first forward that failed before anything was stored: the next one may have another batch size.
        if not self.is_initialized or not self.steps:
            self.lazy_initialization(key_states, value_states)
        for role, new in (("keys", key_states), ("values", value_states)):
            (_, heads, _, channels), (_, own, _, width) = new.shape, self.shapes[role]
            if (new.dtype, heads, channels) != (self.dtype, own, width):
                raise ValueError(
                    f"this layer holds {role} of {dtype_name(self.dtype)}, {own} heads of {width} channels, and got "
                    f"{dtype_name(new.dtype)}, {heads} heads of {channels}; use a cache for each model and dtype"
                )
        self._arrived = (key_states, value_states)
        return self, self

    @with_ordinary_tensors
    def attend(self, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
        """Attention of `query [rows, heads, n, D]` over everything held and the n new tokens; then stores these.

        `mask` is the 2-D padding mask or None. Padded queries get zeros. Returns `[rows, heads, n, D]`.
        """
        if self._arrived is None or self.store is None:
            raise ValueError(
                "a layer attends to keys and values of another layer, which a compressed cache has already encoded; run this model "
                "with the cache of transformers"
            )
        given, self._arrived = QKV(query, *self._arrived), None
        self._check_window(logits.sliding)
        forward = self.sequences.begin(self.steps + 1, query.shape[0], query.shape[2], mask)
        self.steps += 1
        # A prompt has the gradients of plain attention. Later forwards refuse them: stored tokens have none, and change in place.
        refusing = (any(forward.before) or in_chunks(forward, self.plan.encoding_chunk)) and wants_gradients(*given)
        with OneChoice(forward.choices), torch.no_grad() if refusing else _AS_IT_IS:
            if forward.recorded:
                output = attended_unstored(self.store, self.sequences, self.plan, forward, given, logits)
                real = given.of_columns(slice(forward.width)) if forward.speculative else given
                forward.hold(Draft(partial(self._take_in, logits), self._draft(real)))
            else:
                output = self._stored(forward, given, logits)
                forward.stored()
        self.seen += forward.width
        return without_gradients(output, *given) if refusing else output

    def state(self) -> State:
        """Returns everything that the layer has stored, for a file."""
        assert self.store is not None
        shapes = {f"{role}_shape": [shape[1], shape[3]] for role, shape in self.shapes.items()}
        return {"dtype": dtype_name(self.dtype), "seen": self.seen, "store": self.store.state()} | shapes

    @with_ordinary_tensors
    def restore(self, state: State, like: tuple[Tensor, Tensor], seen: int) -> None:
        """Fills the layer from `state`, which the method `state` returned; the sequence state is restored already, `seen`
        columns.

        `like` are keys and values `[any, kv_heads, any, head_dim]` in the model's dtype, on the device to store on. Raises
        StateError.
        """
        dtype = dtype_named(state.get("dtype"))
        if dtype != like[0].dtype:
            raise StateError(
                f"keys of {dtype_name(dtype)}, expected {dtype_name(like[0].dtype)} as the model computes them"
            )
        for role, part in zip(("keys", "values"), like, strict=True):
            shape = wholes(state, f"{role}_shape", least=1)
            if shape != [part.shape[1], part.shape[3]]:
                expected = f"{part.shape[1]} heads of {part.shape[3]} channels"
                raise StateError(f"'{role}_shape' is {printable(shape)}, expected {expected} as the model has")
        own, rows = branch(state, "store"), len(self.sequences.lengths)
        keys, values = (part.new_zeros(rows, part.shape[1], 0, part.shape[3]) for part in like)
        # On the meta device first: the file's shapes and numbers are compared before anything is allocated for them.
        self.plan.open(keys.to("meta"), values.to("meta"), self.sequences, self.context).restore(own)
        self.lazy_initialization(keys, values)
        assert self.store is not None
        self.store.restore(own)
        self.seen, self.steps = seen, 1

    @with_ordinary_tensors
    def fill(self, keys: Tensor, values: Tensor, mask: Tensor | None, seen: int) -> None:
        """Stores a prompt without computing attention: an empty layer is then as after a prefill. Not for plans that observe
        attention.

        `keys`, `values [rows, kv_heads, n, head_dim]`; `mask [rows, n]` is 0 for padding, or None without padding; `seen` is
        the number of columns that `get_seq_length` reports afterwards.
        """
        self.update(keys, values)
        assert self._arrived is not None and self.store is not None and not self.store.observes
        arrived, self._arrived = self._arrived, None
        forward = self.sequences.begin(self.steps + 1, len(keys), keys.shape[2], mask)
        self.steps += 1
        self.store.prepare(forward)
        stored(self.store, forward, QKV(keys[:, :, :0], *arrived))
        forward.stored()
        self.seen = seen

    def _check_window(self, asked: int | None) -> None:
        kept = self.sequences.sliding
        if kept is not None and (asked is None or asked > kept):
            raise ValueError(
                f"this layer attends {'to everything' if asked is None else f'{asked} tokens back'}, and the cache keeps "
                f"the {kept} tokens of the configuration's sliding_window; set that to the largest window of any layer"
            )

    def _draft(self, given: QKV) -> tuple[Tensor, ...]:
        """Copies of what storing will need: the query only where attention decides where tokens go."""
        assert self.store is not None
        query = given.query if self.store.observes else given.query[:, :0]
        return tuple(part.detach().clone() for part in (query, given.keys, given.values))

    @with_ordinary_tensors
    def _take_in(self, logits: Logits, forward: Forward, *draft: Tensor) -> None:
        assert self.store is not None
        given = QKV(*draft)
        self.store.prepare(forward)
        if self.store.observes and forward.width:  # attended again, now that it is known which drafts were kept
            attended_and_stored(self.store, self.plan, forward, given, logits)
        else:
            stored(self.store, forward, given)
        forward.stored()

    def _stored(self, forward: Forward, given: QKV, logits: Logits) -> Tensor:
        """Attends and stores, by repeating the kernel launches of an earlier step of the same block where one was recorded."""
        store, taped = self.store, self.sequences.taped
        assert store is not None
        step = partial(attended_and_stored, store, self.plan, forward, given, logits)
        first = forward.pending == self.sequences.layers
        if first or not taped.goes_on:
            store.prepare(forward)
        if first:
            key = self._block(forward, given)
            forward.fixed_shapes = taped.begin(self.sequences.steps, key, key is not None and store.encodes(forward))
        if first or not forward.fixed_shapes:  # the first layer computes what all layers share
            return step()
        way = store.branch(forward), logits
        return taped.run(self.context.layer, self.plan, way, step, given, forward)

    def _block(self, forward: Forward, given: QKV) -> Hashable | None:
        """A key that equals those of decode steps with the same launches; None unless this is a decode step by Triton outside
        graphs."""
        assert self.store is not None
        rows, alone = given.query.shape[0], forward.graph_inputs is None and forward.host_forward is None
        one_each = forward.width == 1 and forward.columns is None and not forward.speculative and all(forward.before)
        if not (alone and one_each and rows <= TILE_TOKENS // PAGE_TOKENS and prefers_triton(given.query.device)):
            return None
        if wants_gradients(*given) or torch.compiler.is_compiling():
            return None
        return self.store.graph_key(forward)

    if not TYPE_CHECKING:  # hidden from mypy, which still reports misspelt attributes
        # Both raise a helpful error in a model that treats what `update` returned as a tensor.
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"a compressed layer is no tensor and has no {name!r}: {NO_TENSOR}")

        @classmethod
        def __torch_function__(cls, function: Any, *_: Any) -> Any:
            raise TypeError(f"a compressed layer is no tensor for {function.__name__!r}: {NO_TENSOR}")

    def get_seq_length(self) -> int:
        """Columns seen, padding included: the number by which transformers counts positions and masks."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns: (seen + query_length, 0)."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def reset(self) -> None:
        """Removes every token."""
        self._clear()

    @property
    def record_past(self) -> bool:
        """Whether the tokens of a forward stay unconfirmed until `crop`, in transformers' term; one flag for all layers."""
        return self.sequences.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.sequences.recording = recording

    def activate_past_recording(self) -> None:
        """From now on the last forward's tokens stay exact and can be removed again, until `crop` or the next forward."""
        self.record_past = True

    @with_ordinary_tensors
    def to(self, device: torch.device) -> None:
        """Moves the stored tokens and the plan's tables to `device`."""
        self.sequences.taped.forget()
        if self.store is None:
            return
        self.store.to(device)
        self.plan, self.device = self.store.plan, device

    @with_ordinary_tensors
    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Row i becomes a copy of row `sources[i]` (int64 `[rows]`); `kept` as `SequenceState.permute` returned it."""
        if self.store is not None:
            self.store.permute(sources, kept)
