"""Decode steps replayed from CUDA graphs: between two encodings the steps of a cache differ only in a few numbers.

A step of one token per row takes hundreds of small kernels, and the host needs longer to launch them than a GPU to run them. So
the first step of a block runs normally, but with the shapes of the whole block and with its numbers (lengths, slots) in tensors
at fixed addresses (`GraphInputs`). The second step is recorded; all others update these tensors and replay it. Any other
forward (a prompt, drafts, a step that encodes) runs normally and ends the recording. Only a step that encodes into memory that
is already allocated does not end it: for this, windows are allocated whole, and rows have a few pages more than they need
(`SequenceState.keeps_room`).
"""

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from calib.runtime.cache_argument import NAMES, cache_in
from calib.runtime.device.graph_inputs import GraphInputs
from calib.runtime.graphs.recorded_step import Record, Recorded, recorder
from calib.runtime.layer import CompressedLayer
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.sequence_state import SequenceState


@dataclass
class _Block:
    """Steps that differ only in their numbers and in the contents of their tensor arguments.

    `given` are copies of these arguments at the addresses that the recorded step reads; `recorded` is set in the second step.
    """

    key: Hashable
    given: dict[str, Tensor]
    graph_inputs: GraphInputs[Forward] = field(default_factory=GraphInputs)
    recorded: Recorded | None = None


class StepGraphs:
    """The graphs of one cache."""

    def __init__(self, sequences: SequenceState, layers: list[CompressedLayer], record: Record) -> None:
        """`sequences` and `layers` are those of the cache, all of which are compressed; `record` records a step."""
        self.sequences, self.layers, self.record = sequences, layers, record
        self.block: _Block | None = None
        self.replays = 0  # how many steps were replayed so far
        self.refused = False  # the model cannot be recorded

    def of(self, sequences: SequenceState, layers: list[CompressedLayer]) -> "StepGraphs":
        """The graphs of a copy of the cache, without any recording."""
        return StepGraphs(sequences, layers, self.record)

    def forget(self) -> None:
        """Drops the recording; the next step starts a block."""
        self.block = None

    def run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """What `forward(**named)` returns: by a replay where possible."""
        given = None if self.refused else self._given(named)
        if given is None:
            self.forget()
            return forward(**named)
        step = self.sequences.begin(self.sequences.steps + 1, len(self.sequences.lengths), 1, None)
        key, first = self._key(step, named, given), self.layers[0].store
        encodes = key is not None and first is not None and first.encodes(step)
        if key is None or encodes:
            if self.block is not None and self.block.key != key:
                self.forget()
            self._tell(step, named)
            return forward(**named)
        if self.block is None or self.block.key != key:
            self.block = _Block(key, {name: tensor.clone() for name, tensor in given.items()})
            return self._fed(self.block, step, forward, named)
        block = self.block
        for name, tensor in given.items():
            block.given[name].copy_(tensor)
        if block.recorded is None:
            return self._recorded(block, step, forward, named)
        block.graph_inputs.feed(step)
        for layer in self.layers:  # the graph does the work on the device; these counters are on the host
            layer.steps += 1
            layer.seen += 1
        step.stored_by_all()
        self.replays += 1
        block.recorded.replay()
        return _copied(block.recorded.result)

    def _fed(self, block: _Block, step: Forward, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Runs the first step normally, with shapes and numbers as in the block's other steps."""
        step.graph_inputs = block.graph_inputs
        self._tell(step, block.given)
        return forward(**self._arguments(block, named))

    def _tell(self, step: Forward, given: dict[str, Any]) -> None:
        """Sets the step's token ids where a method needs them: the step has begun before the embedding hook sees them."""
        if any(layer.plan.needs_token_ids for layer in self.layers):
            step.ids = given.get("input_ids")

    def _recorded(self, block: _Block, step: Forward, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Records the step and replays it once. If the model cannot be recorded, this and all later steps run normally."""
        held = [(layer.steps, layer.seen) for layer in self.layers]
        block.graph_inputs.settle()
        block.graph_inputs.feed(step)
        step.graph_inputs = block.graph_inputs
        self._tell(step, block.given)
        try:
            recorded = self.record(lambda: forward(**self._arguments(block, named)))
        except Exception as error:  # from the model's code; nothing of the step has run on the device
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"decode steps are not replayed from graphs: {type(error).__name__}: {reason}", stacklevel=2)
            self.refused = True
            self.forget()
            for layer, (steps, seen) in zip(self.layers, held, strict=True):
                layer.steps, layer.seen = steps, seen
            step.started_over(len(self.layers))
            self._tell(step, named)
            return forward(**named)
        block.recorded = recorded
        recorded.replay()
        return _copied(recorded.result)

    def _given(self, named: dict[str, Any]) -> dict[str, Tensor] | None:
        """The tensor arguments of a step with one token per row; None for any other forward."""
        sequences, tokens = (
            self.sequences,
            [named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None],
        )
        mask = named.get("attention_mask")
        if (
            torch.is_grad_enabled()
            or len(tokens) != 1
            or tokens[0].shape[:2] != (len(sequences.lengths), 1)
            or not all(sequences.lengths)
            or sequences.recording
            or sequences.speculating
            or sequences.unconfirmed
            or named.get("use_cache") is False
            or (mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2))
        ):
            return None
        given = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        # Where all rows hold tokens, the mask of a decode step says nothing; and its shape changes with every step.
        given.pop("attention_mask", None)
        if "position_ids" not in given:  # as models count by default
            position = self.layers[0].get_seq_length()
            given["position_ids"] = torch.full((len(sequences.lengths), 1), position, device=tokens[0].device)
        return given

    def _key(self, step: Forward, named: dict[str, Any], given: dict[str, Tensor]) -> Hashable | None:
        """The key that all steps of a block share; None for a step that must run normally."""
        others = tuple(
            (name, value) for name, value in named.items() if name not in NAMES and not isinstance(value, Tensor)
        )
        try:
            hash(others)
        except TypeError:
            return None
        tensors = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in given.items())
        # Layers share the sequence state: the first layer's key stands for all, but whether all can be recorded is checked once.
        first, *further = self.layers
        key = (first.store and first.store.graph_key(step), others, tensors, torch.is_inference_mode_enabled())
        if key[0] is None or (self.block is not None and self.block.key == key):
            return None if key[0] is None else key
        return None if any(layer.store is None or layer.store.graph_key(step) is None for layer in further) else key

    @staticmethod
    def _arguments(block: _Block, named: dict[str, Any]) -> dict[str, Any]:
        """The step's arguments, with tensors at the addresses of the block."""
        return {name: None if name == "attention_mask" else value for name, value in named.items()} | block.given


def graphs_for(model: PreTrainedModel, sequences: SequenceState, layers: list[Any]) -> StepGraphs:
    """Returns the graphs of a cache for `model`. Raises ValueError where steps cannot be replayed."""
    record = recorder(model.device)
    if record is None:
        raise ValueError(f"graphs=True replays CUDA graphs, and the model is on {model.device}; move it first")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise ValueError(
            "graphs=True replays the steps of one GPU, and the model lies on several; leave it out for this one"
        )
    if not all(isinstance(layer, CompressedLayer) for layer in layers):
        raise ValueError(
            "graphs=True replays steps of models whose layers are all compressed; leave it out for this one"
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"graphs=True passes position_ids, and {type(model).__name__} takes none; leave it out")
    sequences.keeps_room = True
    return StepGraphs(sequences, layers, record)


def replaying(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the `forward` of a model, such that decode steps of a cache with graphs are replayed."""
    names = list(inspect.signature(forward).parameters)

    @wraps(forward)
    def run(*args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        graphs = getattr(cache_in(given), "graphs", None)
        return forward(*args, **named) if graphs is None else graphs.run(forward, given)

    return run


def _copied(result: Any) -> Any:
    """A copy of a result, because the next replay overwrites the original."""
    if isinstance(result, Tensor):
        return result.clone()
    if isinstance(result, ModelOutput):
        # Attributes, and those that are not None also as items. The constructor and `__setitem__` would check each of them.
        copied = OrderedDict.__new__(type(result))
        own = vars(copied)
        own.update(vars(result))
        for name, value in result.items():
            own[name] = _copied(value)
            OrderedDict.__setitem__(copied, name, own[name])
        return copied
    return type(result)(map(_copied, result)) if isinstance(result, tuple | list) else result
