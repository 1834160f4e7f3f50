"""Watching a model generate: every forward's logits are kept, compared with the shadow's, and perhaps replaced by them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from contract.shadow import Shadow
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from calib.runtime.cache import CompressedCache


@dataclass
class Watched:
    """What was seen of one run.

    Attributes:
        inputs: `input_ids` of every forward.
        widths: columns of every forward.
        logits: logits of every forward, `[real columns kept, vocabulary]`, as the run went on with them.
        masks: the padding mask of each cache's last forward.
        worst: the largest difference from the shadow's logits, divided by the shadow's largest logit of that forward.
    """

    inputs: list[Tensor] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    masks: dict[Cache, Tensor | None] = field(default_factory=dict)
    worst: float = 0.0

    def parting(self, other: "Watched") -> int:
        """The first forward whose inputs are not those of `other`; the number of forwards where all are."""
        same = [torch.equal(*pair) for pair in zip(self.inputs, other.inputs, strict=False)]
        return same.index(False) if False in same else len(same)


@contextmanager
def watching(
    model: PreTrainedModel, shadow: Shadow | None, answers: bool = False, given: list[Tensor] | None = None
) -> Iterator[Watched]:
    """Forwards of `model` through a cache are seen while this is open.

    With a `shadow`, those through a compressed cache are compared with it; where `answers` is set the caller goes on
    with the shadow's answer, except that the first forwards go on with the logits `given`.
    """
    seen, original = Watched(), model.forward

    @functools.wraps(original)
    def forward(**inputs: Any) -> CausalLMOutputWithPast:
        cache = inputs.get("past_key_values")
        if not isinstance(cache, Cache):
            return original(**inputs)
        expected = shadow.answer(cache, inputs) if shadow and isinstance(cache, CompressedCache) else None
        found = original(**inputs)
        real = real_columns(inputs, found.logits.shape[1])
        if expected is not None:
            seen.worst = max(seen.worst, difference(found.logits[real], expected.logits[real]))
        if answers and expected is not None:
            found.logits = expected.logits.to(found.logits.dtype)
            if found.hidden_states is not None:
                found.hidden_states = tuple(state.to(found.logits.dtype) for state in expected.hidden_states)
        if given is not None and len(seen.inputs) < len(given):
            found.logits[real] = given[len(seen.inputs)]
        seen.inputs.append(inputs["input_ids"].clone())
        seen.widths.append(inputs["input_ids"].shape[1])
        seen.masks[cache] = inputs.get("attention_mask")
        seen.logits.append(found.logits[real].clone())
        return found

    model.forward = forward
    try:
        yield seen
    finally:
        del model.forward


def real_columns(inputs: dict[str, Any], kept: int) -> Tensor:
    """bool `[rows, kept]`: which of the last `kept` columns of a forward are tokens and not padding."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones(inputs["input_ids"].shape[0], kept, dtype=torch.bool)
    return mask[:, mask.shape[1] - kept :].bool()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest expected value; NaN, which is larger than nothing, is refused."""
    assert found.isfinite().all(), "the answer is not finite"
    assert expected.isfinite().all(), "the oracle's answer is not finite"
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
