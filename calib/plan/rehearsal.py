"""The fit's statistics for one layer of the model, fed with random numbers: what they give has the shapes that a fit gives."""

import copy
from typing import Any

import torch

from calib.capture.sample import LayerSample
from calib.fit.calibration import Calibration
from calib.plan.subject import Subject
from calib.statistics.contract import Shape
from calib.statistics.residual_basis import residual_forms

TOKENS = 64


def rehearse(calibration: Calibration, subject: Subject, length: int) -> Calibration:
    """`calibration`, as it was configured, for one layer and a few random tokens: every statistic has seen something.

    A residual basis in groups of more tokens than a sequence has is missing, as it is from the fit.
    """
    rehearsed = copy.deepcopy(calibration)
    rehearsed.clip_factors = calibration.clip_factors[:1]  # of which no shape depends
    rehearsed.prepare(subject.one_layer(), seed=0)
    forms = residual_forms(subject.shape.head_dim, calibration.residual_forms)
    groups = [(form.group or (None,))[0] or 1 for form in forms]
    sample = random_sample(subject.shape, min(length, max(TOKENS, *groups)))
    for stage in rehearsed.stages():
        rehearsed.begin(stage)
        rehearsed.observe(sample)
    return rehearsed


def random_sample(shape: Shape, tokens: int) -> LayerSample:
    """A layer's sample of one sequence, float32."""
    drawn = torch.Generator().manual_seed(0)
    heads = {"queries": shape.heads, "keys": shape.kv_heads, "values": shape.kv_heads}
    parts: dict[str, Any] = {
        name: torch.randn(1, count, tokens, shape.head_dim, generator=drawn) for name, count in heads.items()
    }
    places = torch.arange(tokens)[None]
    return LayerSample(
        layer=0,
        keys_before_rope=parts["keys"],
        mask=torch.ones_like(places, dtype=torch.bool),
        positions=places,
        index=places,
        scaling=shape.head_dim**-0.5,
        **parts,
    )
