"""The cache that `model.generate(past_key_values=...)` fills: a transformers `Cache` of compressed layers."""

import copy
import os
import weakref
from collections.abc import Callable
from operator import index
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationMode

from calib.runtime import layer_beside
from calib.runtime.attachment import Attachment
from calib.runtime.cache_argument import NAME, cache_in
from calib.runtime.cache_memory import memory_of
from calib.runtime.files.state import State, StateError, branch, pages_in, tensor_like, whole
from calib.runtime.graphs.step_graphs import StepGraphs
from calib.runtime.held_tier import HeldTier
from calib.runtime.layer import CompressedLayer
from calib.runtime.memory import Memory
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.modes import with_ordinary_tensors
from calib.runtime.offload.speculator import Speculator
from calib.runtime.paging import stored_sequence_state
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.prefix import prefix
from calib.runtime.untraced import untraced


class CompressedCache(Cache):
    """A transformers `Cache` whose attention layers are compressed. In a model that also has full-attention layers,
    sliding-window layers stay as transformers makes them; so do layers with recurrent states instead of keys and values.

    Made by `compress`. `release()`, or leaving the `with` block, gives the model its own attention back. The cache keeps no
    reference to the model.
    """

    def __init__(
        self,
        layers: list[CacheLayerMixin],
        sequences: SequenceState,
        origin: prefix.Origin,
        attachment: Attachment | None,
        speculator: Speculator | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        super().__init__(layers=layers)
        self.sequences, self.origin, self.speculator, self.graphs = sequences, origin, speculator, graphs
        self.input_ids: Tensor | None = None  # those saved with the prefix, if any
        self._hold(attachment)

    def _hold(self, attachment: Attachment | None) -> None:
        self._attachment = attachment
        if attachment is not None:
            # Also when the cache is garbage-collected without release(): the model must not keep calib's attention.
            weakref.finalize(self, attachment.release)

    @with_ordinary_tensors
    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedCache":
        """Returns an independent cache with the same content, attached to the same model unless this cache was released."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        own = {name: value for name, value in vars(self).items() if name not in ("_attachment", "graphs")}
        copied.__dict__.update(copy.deepcopy(own, memo))
        copied.graphs = self.graphs and self.graphs.of(copied.sequences, copied.compressed)
        hold = self._attachment and self._attachment.again(copied.sequences, copied.speculator)
        copied._hold(hold or self._attachment)  # the copy of a released cache counts as released
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a compressed cache is not pickled; cache.save(path) writes it, compress(..., prefix=path) reads it, and "
            "copy.deepcopy(cache) copies it"
        )

    def release(self) -> None:
        """Detaches the cache from its model, which is then exactly as before; what was stored can still be measured."""
        if self._attachment is not None:
            self._attachment.release()
        if self.graphs is not None:
            self.graphs.forget()

    def __enter__(self) -> "CompressedCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def method(self) -> str:
        """The method's name."""
        return self.origin.method

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that this cache compresses."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @untraced
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Hands new tokens to their layer and returns what it returns: the layer twice where it is compressed, else keys and
        values.

        Raises ValueError for a cache that was released, and for a layer number that this cache does not have.
        """
        if self._attachment is not None and self._attachment.released:
            raise ValueError(
                "this cache was released, and its model uses its own attention again; make another with compress(model, ...), and "
                "prefix=path if this one was saved"
            )
        try:
            layer = self.layers[layer_idx]
        except IndexError as error:
            raise ValueError(
                f"this cache has {len(self.layers)} layers, and a model asks for layer {layer_idx}; use a cache for each model"
            ) from error
        if isinstance(layer, CompressedLayer):
            return layer.update(key_states, value_states)
        states: tuple[Any, Any] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer_beside.let_go(layer)
        return states

    @property
    def _is_user_defined(self) -> bool:
        """True, for transformers: the cache outlives `generate`, which sets this attribute before its first forward.

        Setting it ends the past recording of an earlier `generate`. transformers turns that on for drafts and never off: the
        whole next prompt would stay unconfirmed, and uncompressed layers would keep every token from then on.
        """
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, _: bool) -> None:
        if self.sequences.recording:
            self.crop(0)
            for layer in self.layers:
                if layer.is_croppable:
                    layer.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Stores the unconfirmed tokens of the last forward without its newest `-tokens_to_remove` columns (0: all of them).

        Tokens can only be removed while past recording is on; transformers turns it on for prompt lookup and assisted decoding.
        Raises ValueError for more columns than are unconfirmed, for a positive number, and where a layer has a recurrent state
        that already includes the tokens to remove.
        """
        try:
            removed, drafts = -index(tokens_to_remove), self.sequences.unconfirmed  # or a tensor, from older releases
        except TypeError as error:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, a whole number, got {printable(tokens_to_remove)}"
            ) from error
        if removed < 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {-removed}; say {removed}")
        if removed > drafts:
            raise ValueError(
                f"cannot remove {removed} tokens, at most the {drafts} of the last forward that are not stored yet; "
                "call cache.activate_past_recording() before a forward whose tokens may be taken back"
            )
        if removed and not self.is_croppable:
            raise ValueError(
                f"cannot remove {removed} tokens: this model has recurrent layers, whose states already include them; "
                "copy.deepcopy(cache) before a forward whose tokens may be taken back"
            )
        self.sequences.confirm(removed)
        self._forget()
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.seen -= removed
            # Without past recording transformers' layers refuse even crop(0).
            elif self.sequences.recording and layer.is_croppable and layer_beside.kept(layer):
                layer.crop(-removed)
                layer_beside.let_go(layer)

    def to(self, device: torch.device | str | int) -> "CompressedCache":
        """Moves everything stored to `device`, in place, and returns the cache; the model's next forward must run there.

        Raises ValueError for an argument that is not a device.
        """
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"a cache moves to a device, such as 'cpu' or 'cuda:1', got {device!r}") from error
        self.sequences.confirm()
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.to(target)
            else:
                layer_beside.move(layer, target)
        for table in self.sequences.all_tables:
            table.leave_devices()
        self._forget()
        return self

    def reset(self) -> None:
        """Removes every token; the cache can be used again, for any batch."""
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.reset()
            else:
                layer_beside.empty(layer)
        self.sequences.clear()
        self.input_ids = None
        self._forget()

    def save(
        self,
        path: str | os.PathLike[str],
        input_ids: Tensor | None = None,
        storage_bits: float | None = None,
    ) -> None:
        """Writes everything stored to one safetensors file, for `compress(..., prefix=path)`; unconfirmed tokens are stored
        first.

        The file appears only when all of it is written.

        Args:
            path: path of the file.
            input_ids: integers `[rows, columns seen]`, which come back as `cache.input_ids`. Append a question to these ids and
                not to the text: the tokens of a longer text need not begin with those of a shorter one.
            storage_bits: writes keys and values as codes of `klt` with this many bits a value (`Codec`) instead of the cache's
                own form; the first 4 tokens stay exact, and tokens that this cache has encoded are decoded first. Any method that
                needs no queries to store a token can load the file; its cache is filled as by a prefill. Needs klt's numbers
                in the artifact.

        Raises:
            PrefixError: the cache is empty, its model is gone, or the file cannot be written; with `storage_bits` also a cache
                that has evicted tokens or needs queries to store them, sliding-window layers beside others, no artifact, and a
                budget out of its range.
        """
        prefix.save(self, path, input_ids, storage_bits)

    def state(self) -> State:
        """Returns everything stored as nested dicts of tensors and numbers, which `restore` reads."""
        layers = {
            str(number): layer.state() if isinstance(layer, CompressedLayer) else layer_beside.state_of(layer)
            for number, layer in enumerate(self.layers)
        }
        speculative: State = (
            {}
            if self.speculator is None or self.speculator.tokens is None
            else {"speculative_tokens": self.speculator.tokens}
        )
        return {"rows": self.sequences.state(), "layers": layers} | speculative

    def restore(self, state: State, like: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Fills this empty cache from `state`, which a cache of the same plan returned. `like(layer)` gives keys and values as
        the model makes them, `[any, kv_heads, any, head_dim]` on the device they are for. Raises StateError where the state
        does not fit."""
        layers = branch(state, "layers")
        stored_sequence_state.restore(self.sequences, branch(state, "rows"), pages_in(layers))
        owns = [branch(layers, str(number)) for number in range(len(self.layers))]
        seen = {whole(own, "seen") for own in owns}
        if len(seen) != 1 or not 0 < max(self.sequences.lengths, default=0) <= min(seen):
            found = f"layers have seen {printable(sorted(seen))} columns"
            raise StateError(
                f"{found}, expected one number for all layers, at least each row's {printable(self.sequences.lengths)} tokens"
            )
        for number, (layer, own) in enumerate(zip(self.layers, owns, strict=True)):
            if isinstance(layer, CompressedLayer):
                layer.restore(own, like(number), *seen)
            else:
                layer_beside.restore(layer, own, like(number), len(self.sequences.lengths), *seen)
        if self.speculator is not None and "speculative_tokens" in state:
            tokens = torch.zeros(len(self.sequences.lengths), dtype=torch.int64, device=like(0)[0].device)
            self.speculator.tokens = tensor_like(state, "speculative_tokens", tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]`: windows are copied, pages are shared until one of the rows writes to them."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, in place; the copies share pages until one of them writes to them.

        Raises ValueError for `repeats` less than 1.
        """
        check_whole("repeats", repeats, least=1, wanted="a whole number, at least 1")
        self.batch_select_indices(torch.arange(len(self.sequences.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, int64 `[rows]`, in that order; an empty cache has no rows, and stays empty.

        Raises ValueError, and changes nothing, unless `indices` is a 1-D tensor of row numbers.
        """
        rows = len(self.sequences.lengths)
        sources = indices.tolist() if isinstance(indices, Tensor) and indices.dim() == 1 else []
        if rows and not (sources and all(type(source) is int and 0 <= source < rows for source in sources)):
            raise ValueError(
                f"rows are chosen by a tensor of one axis with whole numbers 0 ... {rows - 1}, at least one, got "
                f"{printable(indices)}"
            )
        kept = self.sequences.permute(sources)
        if self.speculator is not None:
            self.speculator.permute(indices)
        if self.input_ids is not None:
            self.input_ids = self.input_ids[indices.to(self.input_ids.device)]
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.permute(indices, kept)
            else:
                layer.reorder_cache(indices)  # selects rows; layers with recurrent states have no other method for it

    def _forget(self) -> None:
        """Discards the speculative tokens and the recorded graphs, which the next step can no longer use."""
        for ahead in (self.speculator, self.graphs):
            if ahead is not None:
                ahead.forget()

    def custom_generate(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """For `model.generate(..., past_key_values=cache, custom_generate=cache.custom_generate)`: greedy decoding or sampling.

        It is transformers' own loop. A speculative cache speculates in any loop, so the tokens are the same without this
        function; with it, modes whose steps bring more than one token a row raise an error instead of running without
        speculation. transformers passes no `streamer` to such a function: with one, leave `custom_generate` out.

        Raises ValueError for beams and other modes, and where the model was given another cache.
        """
        mode = generation_config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            asked = "" if generation_config.num_beams == 1 else f" (num_beams={generation_config.num_beams})"
            raise ValueError(
                f"custom_generate decodes greedily or by sampling, got {mode.value}{asked}; leave custom_generate out for that"
            )
        if cache_in(kwargs) is not self:
            raise ValueError(
                f"custom_generate works with its own cache only: pass {NAME}=cache with custom_generate=cache.custom_generate"
            )
        return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    def tiers(self, layer: int) -> list[list[HeldTier]]:
        """Returns for each row the tiers of one layer: how many tokens, which ones, in how many bits.

        Padding does not count. Tokens of an unconfirmed forward and evicted tokens are in no tier.

        Args:
            layer: its number in the model, from 0.

        Raises ValueError for a layer that this cache does not compress.
        """
        held = self.layers[layer] if type(layer) is int and 0 <= layer < len(self.layers) else None
        if not isinstance(held, CompressedLayer):
            numbers = [number for number, own in enumerate(self.layers) if isinstance(own, CompressedLayer)]
            raise ValueError(
                f"layer {printable(layer)} is not compressed by this cache; its layers are {printable(numbers)}"
            )
        return [] if held.store is None else [held.store.tiers_of(row) for row in range(len(self.sequences.lengths))]

    def memory(self) -> Memory:
        """The memory of the cache now: `predicted_bytes` from shapes, `measured_bytes` from the tensors' storage."""
        return memory_of(self.layers, self.sequences)
