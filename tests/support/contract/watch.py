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
from calib.runtime.cache_argument import cache_in


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
        cache = cache_in(inputs)
        speculative = isinstance(cache, CompressedCache) and cache.sequences.speculating
        # Before a speculative cache's first step there is a forward of a guess alone, which no caller sees.
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
            if answers:  # a guess stays as it is
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
    """The arguments of a forward as its caller gave them, without the guess behind each row."""
    true = dict(inputs)
    for name in ("input_ids", "attention_mask", "position_ids", "cache_position"):
        if isinstance(inputs.get(name), Tensor):
            true[name] = inputs[name][..., :-1]
    if inputs.get("logits_to_keep"):
        true["logits_to_keep"] = inputs["logits_to_keep"] - 1
    return true


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
