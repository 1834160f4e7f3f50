"""The base class of all statistics: a module whose buffers are updated with one layer's sample at a time and can be merged.

Buffers are minima, maxima or sums, so merging the statistics of parts of a corpus gives the statistic of the whole, and
several processes can each read a part. They are registered buffers, so a Lightning checkpoint holds an unfinished one.

A sample is reduced on its layer's device, and only the result, small beside the tokens, goes to the buffers' device: the
layers of a model may be on many devices.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, distributed, nn

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.errors import RunError

Reduction = Literal["min", "max", "sum"]
NEUTRAL: Mapping[Reduction, float] = {"min": torch.inf, "max": -torch.inf, "sum": 0}


class Statistic(nn.Module, ABC):
    """A statistic that is being measured.

    `reductions` gives for each buffer how two are merged. A layer without samples (one without attention in a mixed
    model) keeps the reduction's neutral value.
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {}

    @abstractmethod
    def observe(self, sample: LayerSample) -> None:
        """Updates the buffers with one layer's sample; must not keep the sample's tensors."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns the artifact's tensors by name: float32, on the CPU."""

    def merge(self, other: "Statistic") -> None:
        """Merges the statistic of another part of the corpus into this one."""
        self.merge_buffers(dict(other.named_buffers()))

    def merge_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Merges another part's buffers, given by their names in this module, such as those of a shard's file."""
        for name, reduction in self.reductions.items():
            mine, theirs = getattr(self, name), buffers[name]
            merged = {"min": torch.minimum, "max": torch.maximum, "sum": torch.add}[reduction](mine, theirs)
            setattr(self, name, merged)

    def synchronise(self, device: torch.device) -> None:
        """Merges the buffers of all processes, so that each process holds the merged statistic.

        `device` is the device on which tensors are exchanged (NCCL takes none on the CPU).
        """
        operations = {"min": distributed.ReduceOp.MIN, "max": distributed.ReduceOp.MAX, "sum": distributed.ReduceOp.SUM}
        for name, reduction in self.reductions.items():
            mine = getattr(self, name)
            merged = mine.to(device, copy=True)
            distributed.all_reduce(merged, op=operations[reduction])
            setattr(self, name, merged.to(mine.device))

    def clear(self) -> None:
        """Resets the buffers to neutral values, which leave any statistic merged with them unchanged."""
        for name, reduction in self.reductions.items():
            getattr(self, name).fill_(NEUTRAL[reduction])


def tokens_of(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the real tokens of `x [batch, heads, tokens, head_dim]`, by `mask [batch, tokens]`: float32 `[heads, n,
    head_dim]`."""
    return x.transpose(1, 2)[mask].transpose(0, 1).float()


def largest(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the maximum of |x| over real tokens: float32 `[heads, head_dim]`; arguments as in `tokens_of`."""
    return tokens_of(x, mask).abs().amax(1)


def check_shape(sample: LayerSample, shape: Shape) -> None:
    """Raises RunError if a layer's shape differs from the model's: all layers share one tensor."""
    found = (sample.queries.shape[1], *sample.keys.shape[1::2])
    if found != (shape.heads, shape.kv_heads, shape.head_dim) or sample.values.shape != sample.keys.shape:
        raise RunError(
            f"layer {sample.layer} has {found[0]} query heads, {found[1]} KV heads of {found[2]} (values of "
            f"{sample.values.shape[-1]}), the model says {shape.heads}, {shape.kv_heads} of {shape.head_dim}: "
            "models whose layers differ in shape cannot be calibrated"
        )
