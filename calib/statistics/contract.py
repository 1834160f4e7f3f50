"""What every calibrator is: a module whose buffers take in one layer's sample at a time and merge exactly.

Minima, maxima and sums merge: the statistic of a corpus is the merge of its parts' statistics, so several processes can
each read a part. Buffers are registered, so a Lightning checkpoint carries a measurement half done.

A sample is measured on its layer's own device, and what is found there, a few numbers beside the tokens, goes to the
buffers' device: the layers of a model may lie on many.
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
    """A measurement in progress.

    `reductions` says for each buffer how two of them become one. A layer that no sample reached (a layer without
    attention in a mixed model) keeps neutral values.
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {}

    @abstractmethod
    def observe(self, sample: LayerSample) -> None:
        """Takes in one layer's sample; keeps nothing of it but what its buffers hold."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What goes into the artifact: float32 tensors by name, on the CPU."""

    def merge(self, other: "Statistic") -> None:
        """Takes in the statistic of another part of the corpus."""
        self.merge_buffers(dict(other.named_buffers()))

    def merge_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Takes in another part's buffers, by their names in this module: what a process on another machine has measured."""
        for name, reduction in self.reductions.items():
            mine, theirs = getattr(self, name), buffers[name]
            merged = {"min": torch.minimum, "max": torch.maximum, "sum": torch.add}[reduction](mine, theirs)
            setattr(self, name, merged)

    def synchronise(self, device: torch.device) -> None:
        """Merges over all processes, where there are several: afterwards each holds the statistic of the whole.

        `device` is where the processes exchange tensors (NCCL takes none from the CPU).
        """
        operations = {"min": distributed.ReduceOp.MIN, "max": distributed.ReduceOp.MAX, "sum": distributed.ReduceOp.SUM}
        for name, reduction in self.reductions.items():
            mine = getattr(self, name)
            merged = mine.to(device, copy=True)
            distributed.all_reduce(merged, op=operations[reduction])
            setattr(self, name, merged.to(mine.device))

    def clear(self) -> None:
        """Forgets all that was measured: merged with another statistic it leaves that as it is."""
        for name, reduction in self.reductions.items():
            getattr(self, name).fill_(NEUTRAL[reduction])


def tokens_of(x: Tensor, mask: Tensor) -> Tensor:
    """The real tokens of `x [batch, heads, tokens, head_dim]`: float32 `[heads, tokens', head_dim]`."""
    return x.transpose(1, 2)[mask].transpose(0, 1).float()


def largest(x: Tensor, mask: Tensor) -> Tensor:
    """max over real tokens of |x|: float32 `[heads, head_dim]`."""
    return tokens_of(x, mask).abs().amax(1)


def check_shape(sample: LayerSample, shape: Shape) -> None:
    """RunError where a layer differs from the rest of the model: one tensor could not hold both."""
    found = (sample.queries.shape[1], *sample.keys.shape[1::2])
    if found != (shape.heads, shape.kv_heads, shape.head_dim) or sample.values.shape != sample.keys.shape:
        raise RunError(
            f"layer {sample.layer} has {found[0]} query heads, {found[1]} KV heads of {found[2]} (values of "
            f"{sample.values.shape[-1]}), the model says {shape.heads}, {shape.kv_heads} of {shape.head_dim}: "
            "models whose layers differ in shape cannot be calibrated"
        )
