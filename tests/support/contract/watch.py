"""Records the logits of every forward while a model generates, compares them with the shadow's, and may replace them by these."""

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
from calib.runtime.cache_argument import cache_in


@dataclass
class Watched:
    """The record of one run.

    Attributes:
        inputs: `input_ids` of every forward.
        widths: columns of every forward.
        logits: logits of every forward with which the run continued, `[kept columns without padding, vocabulary]`.
        masks: the padding mask of each cache's last forward.
        worst: the largest difference from the shadow's logits, divided by the shadow's largest logit of that forward.
    """

    inputs: list[Tensor] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    masks: dict[Cache, Tensor | None] = field(default_factory=dict)
    worst: float = 0.0

    def parting(self, other: "Watched") -> int:
        """The number of the first forward whose inputs differ from those of `other`; if none does, the number of forwards."""
        same = [torch.equal(*pair) for pair in zip(self.inputs, other.inputs, strict=False)]
        return same.index(False) if False in same else len(same)


@contextmanager
def watching(
    model: PreTrainedModel, shadow: Shadow | None, answers: bool = False, given: list[Tensor] | None = None
) -> Iterator[Watched]:
    """A context that records all forwards of `model` with a cache.

    With a `shadow`, forwards with a compressed cache are compared with it; with `answers`, they return the shadow's output to the
    caller. The first forwards return the logits `given`.
    """
    seen, original = Watched(), model.forward

    @functools.wraps(original)
    def forward(**inputs: Any) -> CausalLMOutputWithPast:
        cache = cache_in(inputs)
        speculative = isinstance(cache, CompressedCache) and cache.sequences.speculating
        # Before the first step of a speculative cache there is a forward of the speculative token alone, whose output is not used.
        if not isinstance(cache, Cache) or (speculative and inputs["input_ids"].shape[1] == 1):
            return original(**inputs)
        true = without_guess(inputs) if speculative else inputs
        answer = shadow.asked(cache, true, speculative) if shadow and isinstance(cache, CompressedCache) else None
        found = original(**inputs)
        logits = found.logits[:, : found.logits.shape[1] - speculative]
        real = real_columns(true, logits.shape[1])
        if answer is not None:
            expected = answer()
            seen.worst = max(seen.worst, difference(logits[real], expected.logits[real]))
            if answers:  # the output for a speculative token is not changed
                logits.copy_(expected.logits)
                for mine, other in zip(found.hidden_states or (), expected.hidden_states or (), strict=True):
                    mine[:, : other.shape[1]] = other
        if given is not None and len(seen.inputs) < len(given):
            logits[real] = given[len(seen.inputs)]
        seen.inputs.append(true["input_ids"].clone())
        seen.widths.append(true["input_ids"].shape[1])
        seen.masks[cache] = true.get("attention_mask")
        seen.logits.append(logits[real].clone())
        return found

    model.forward = forward
    try:
        yield seen
    finally:
        del model.forward


def without_guess(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward without the speculative token at the end of each row."""
    true = dict(inputs)
    for name in ("input_ids", "attention_mask", "position_ids", "cache_position"):
        if isinstance(inputs.get(name), Tensor):
            true[name] = inputs[name][..., :-1]
    if inputs.get("logits_to_keep"):
        true["logits_to_keep"] = inputs["logits_to_keep"] - 1
    return true


def real_columns(inputs: dict[str, Any], kept: int) -> Tensor:
    """Which of the last `kept` columns of a forward are no padding: bool `[rows, kept]`."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones(inputs["input_ids"].shape[0], kept, dtype=torch.bool)
    return mask[:, mask.shape[1] - kept :].bool()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; asserts that all numbers are finite."""
    assert found.isfinite().all(), "the answer is not finite"
    assert expected.isfinite().all(), "the oracle's answer is not finite"
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
