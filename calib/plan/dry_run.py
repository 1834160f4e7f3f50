"""The fit's statistics for one layer of the model, fed with random numbers: their results have the shapes of a real fit's."""

import copy
from dataclasses import replace
from typing import Any

import torch

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.fit.calibration import Calibration
from calib.plan.meta_model import MetaModel
from calib.statistics.residual_basis import residual_forms

TOKENS = 64


def dry_run(calibration: Calibration, meta_model: MetaModel, length: int) -> Calibration:
    """Returns a copy of `calibration`, prepared for one layer, whose statistics have all observed a few random tokens.

    If a residual basis has groups of more tokens than a sequence has, that basis is missing, as it is in the fit.
    """
    tried = copy.deepcopy(calibration)
    tried.clip_factors = calibration.clip_factors[:1]  # no shape depends on them
    tried.prepare(meta_model.one_layer(), seed=0)
    forms = residual_forms(meta_model.shape.head_dim, calibration.residual_forms)
    groups = [(form.group or (None,))[0] or 1 for form in forms]
    sample = random_sample(meta_model.shape, min(length, max(TOKENS, *groups)))
    for stage in tried.stages():
        tried.begin(stage)
        tried.observe(replace(sample, taken_at=sample))  # random numbers serve as derivatives too
    return tried


def random_sample(shape: Shape, tokens: int) -> LayerSample:
    """Returns a layer's sample of one sequence of `tokens` random tokens, float32."""
    drawn = torch.Generator().manual_seed(0)
    heads = {"queries": shape.heads, "keys": shape.kv_heads, "values": shape.kv_heads}
    parts: dict[str, Any] = {
        name: torch.randn(1, count, tokens, shape.head_dim, generator=drawn) for name, count in heads.items()
    }
    positions = torch.arange(tokens)[None]
    return LayerSample(
        layer=0,
        keys_before_rope=parts["keys"],
        mask=torch.ones_like(positions, dtype=torch.bool),
        positions=positions,
        index=positions,
        scaling=shape.head_dim**-0.5,
        **parts,
    )
