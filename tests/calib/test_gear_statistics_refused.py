"""What GEAR's calibrated forms read, as parts of a fit and of an artifact: merged, without padding, refused where wrong."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from toy_artifact import toy_artifact, toy_basis, toy_tensors
from toy_layer_sample import SHAPE, rows_of, sample

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.cli import main
from calib.errors import UsageError
from calib.fit.calibration import Calibration
from calib.runtime.artifact.artifact import ArtifactError
from calib.runtime.artifact.tensor_registry import residual_form
from calib.statistics.outlier_thresholds import OutlierThresholds
from calib.statistics.residual_basis import ResidualBasis

MAKE = {"thresholds": lambda: OutlierThresholds(SHAPE, seed=0), "basis": lambda: ResidualBasis(SHAPE)}
NO_FORMS = ("", "1", "x1", "1x", "0x1", "1x0", "-1x1", "01x1", "*x1x1", "1 x1", "²x1", "fixed", "scaled.1x32", "Half")
NO_BITS = ("", "0", "9", "04", "10", "two", "²", "-2")


def seen(statistic, *samples):
    for one in samples:
        statistic.observe(one)
    return statistic


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=examples(5), deadline=None)
@given(cut=st.integers(1, 5), seed=st.integers(0, 3))
def test_parts_merge_into_the_whole(name, cut, seed):
    one = sample(batch=6, tokens=64, seed=seed, padding=(0, 3, 0, 7))
    whole, second = seen(MAKE[name](), one), seen(MAKE[name](), rows_of(one, slice(cut, None)))
    first = seen(MAKE[name](), rows_of(one, slice(0, cut)))
    first.merge(second)
    merged, expected = first.tensors(), whole.tensors()
    assert merged.keys() == expected.keys()
    for key, tensor in expected.items():
        if name == "thresholds":
            assert torch.equal(merged[key], tensor), key
        else:  # float64 sums in another order
            torch.testing.assert_close(merged[key], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MAKE)
def test_padding_never_counts(name):
    one = sample(batch=2, tokens=96, padding=(0, 11))
    one.keys[1, :, :11] = one.values[1, :, :11] = 1e6
    padded = seen(MAKE[name](), one).tensors()
    parts = seen(MAKE[name](), rows_of(one, slice(0, 1)), rows_of(one, slice(1, 2), slice(11, None))).tensors()
    assert padded.keys() == parts.keys()
    for key, tensor in parts.items():
        assert torch.equal(padded[key], tensor), key


@pytest.mark.parametrize("name", MAKE)
def test_float16_near_its_limits_stays_finite(name):
    one = sample()
    large = LayerSample(
        0, *(x.clamp(-1, 1).mul(60_000).half() for x in (one.queries, one.keys, one.keys, one.values)),
        one.mask, one.positions, one.index, one.scaling,
    )  # fmt: skip
    assert all(bool(tensor.isfinite().all()) for tensor in seen(MAKE[name](), large).tensors().values())


@pytest.mark.parametrize("name", MAKE)
def test_what_is_measured_is_an_artifact(name):
    shape = Shape(2, 4, 2, 8)
    made = OutlierThresholds(shape, 0) if name == "thresholds" else ResidualBasis(shape)
    assert toy_artifact(tensors=made.tensors()).tensors.keys() == made.tensors().keys()
    bits = rows_of(sample(), slice(None))
    part = LayerSample(0, *(x[..., :8] for x in (bits.queries, bits.keys, bits.keys, bits.values)), bits.mask,
                       bits.positions, bits.index, 1.0)  # fmt: skip
    assert toy_artifact(tensors=seen(made, part).tensors()).tensors


# ---- wrong requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outlier_shares": []}, r"model.outlier_shares=\[\]: increasing numbers above 0 and below 1"),
        ({"outlier_shares": [0.1, 0.02]}, r"model.outlier_shares=\[0.1, 0.02\]: increasing"),
        ({"outlier_shares": [0.0, 0.02]}, r"model.outlier_shares=\[0.0, 0.02\]: increasing"),
        ({"outlier_shares": [0.5, 1.0]}, r"model.outlier_shares=\[0.5, 1.0\]: increasing"),
        ({"outlier_shares": [math.nan]}, r"model.outlier_shares=\[nan\]: increasing"),
        ({"outlier_shares": [0.1, 0.1 + 1e-12]}, "such as"),  # one number in float32
        ({"residual_bits": []}, r"model.residual_bits=\[\]: increasing bit widths from 1 to 8, such as \[2, 4\]"),
        ({"residual_bits": [0, 2]}, r"model.residual_bits=\[0, 2\]: increasing bit widths from 1 to 8"),
        ({"residual_bits": [9]}, r"model.residual_bits=\[9\]: increasing bit widths from 1 to 8"),
        ({"residual_bits": [4, 2]}, r"model.residual_bits=\[4, 2\]: increasing"),
        ({"residual_bits": [2, 2]}, r"model.residual_bits=\[2, 2\]: increasing"),
        *(
            (
                {"residual_forms": {"values": ["1x*", form]}},
                rf"model.residual_forms.values: '{re.escape(form)}' is no form;",
            )
            for form in NO_FORMS
        ),
        (
            {"residual_forms": {"queries": ["*x1"]}},
            "model.residual_forms: 'queries' is no stream; expected keys or values",
        ),
        ({"residual_rank": 0}, "model.residual_rank=0: must be at least 1"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(options, message):
    with pytest.raises(UsageError, match=message):
        Calibration("nowhere", **options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--model.outlier_shares=[0.1,0.05]",
            "model.outlier_shares=[0.1, 0.05]: increasing numbers above 0 and below 1",
        ),
        ("--model.residual_bits=2", "invalid value '2' for 'model.residual_bits' (expected list"),
        ("--model.residual_bits=[4,2]", "model.residual_bits=[4, 2]: increasing bit widths from 1 to 8"),
        ("--model.residual_forms.values=[1x*, 1y4]", "model.residual_forms.values: '1y4' is no form"),
        ("--model.residual_forms.queries=[]", "model.residual_forms: 'queries' is no stream"),
        ("--model.residual_forms=[]", "for 'model.residual_forms' (expected dict"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(capsys, option, message):
    options = ["fit", "--model.path=nowhere", "--data.name=generated", "--output=x.calib.safetensors"]
    assert main([*options, option]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("calib: error: ")
    assert message in error[0]
    assert not Path("x.calib.safetensors").exists()


# ---- the registry


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("outliers.shares", torch.zeros(0), r"is torch.float32 \[0\], expected torch.float32 \[1\] = \[n\]"),
        ("outliers.shares", torch.tensor(0.5), r"is torch.float32 \[\], expected torch.float32 \[1\]"),
        ("outliers.shares", torch.tensor([0.1, 0.2]).double(), "is torch.float64"),
        ("outliers.shares", torch.tensor([0.1, 0.02]), "is 0.1, 0.02, expected increasing numbers above 0 and below 1"),
        ("outliers.shares", torch.tensor([0.02, 0.02]), "expected increasing"),
        ("outliers.shares", torch.tensor([0.0, 0.02]), "expected increasing"),
        ("outliers.shares", torch.tensor([0.02, 1.0]), "expected increasing"),
        (
            "keys.outliers.channel.low",
            torch.zeros(2, 2, 8),
            r"expected torch.float32 \[2, 2, 8, 2\] = \[layers, kv_heads",
        ),
        ("values.outliers.head.high", torch.zeros(2, 2, 3), r"expected torch.float32 \[2, 2, 2\]"),
        ("values.outliers.layer.low", torch.zeros(2, 2).half(), "is torch.float16"),
        (
            "keys.outliers.head.low",
            torch.full((2, 2, 2), 9.0),
            "above 'keys.outliers.head.high' at layer 0, head 0, share 0",
        ),
        ("keys.residual.*x1.4", torch.zeros(2, 2, 3, 8), "off by 1 at layer 0, head 0, expected rows"),
        ("keys.residual.*x1.4", torch.eye(8)[:3].expand(2, 2, 3, 8) * 1.001, "orthonormal to 0.001"),
        (
            "keys.residual.*x1.4",
            torch.zeros(2, 2, 0, 8),
            r"is torch.float32 \[2, 2, 0, 8\], expected torch.float32 \[2, 2, 1, 8\]",
        ),
        ("keys.residual.*x1.4", torch.zeros(2, 2, 9, 8), r"expected torch.float32 \[2, 2, 8, 8\]"),
        ("values.residual.odd.8", torch.eye(8), "expected torch.float32"),
        *(
            (
                f"keys.residual.{rest}",
                torch.eye(8)[:3].expand(2, 2, 3, 8),
                r"has no valid bit width in its name, expected FORM\.BITS",
            )
            for rest in ("", "*x1", "4", ".4", *(f"*x1.{bits}" for bits in NO_BITS))
        ),
    ],
)
def test_the_registry_refuses(name, tensor, message):
    with pytest.raises(ArtifactError, match=message) as caught:
        toy_artifact(tensors={**toy_tensors(), name: tensor})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_thresholds_without_their_shares_are_refused():
    tensors = toy_tensors()
    del tensors["outliers.shares"]
    with pytest.raises(ArtifactError, match=r"'keys\.outliers\.[a-z.]+' is present and 'outliers\.shares' is not"):
        toy_artifact(tensors=tensors)


def test_a_basis_of_as_many_vectors_as_channels_or_of_one_is_an_artifact():
    draw = torch.Generator().manual_seed(0)
    for rank in (1, 8):
        name = "keys.residual.64x1.1"
        assert toy_artifact(tensors={name: toy_basis((2, 2, 8), rank, draw)}).has(name)


def test_a_name_says_stream_form_and_width():
    assert residual_form("keys.residual.*x1.4") == ("keys", "*x1", 4)
    assert residual_form("values.residual.scaled.1x32.8") == ("values", "scaled.1x32", 8)
    for name in ("keys.residual.*x1", "keys.residual.4", "queries.residual.*x1.4", "keys.clip.*x1.4"):
        assert residual_form(name) is None


@pytest.mark.parametrize(
    ("name", "calibrator"),
    [
        ("outliers.shares", "outlier_thresholds"),
        ("keys.outliers.channel.low", "outlier_thresholds"),
        ("values.outliers.layer.high", "outlier_thresholds"),
        ("values.residual.1x*.4", "residual_basis"),
    ],
)
def test_every_tensor_names_its_calibrator(name, calibrator):
    with pytest.raises(ArtifactError, match=f"calibrator '{calibrator}' of"):
        toy_artifact(tensors={}).tensor(name)
    for other in ("keys.outliers.row.low", "keys.outliers.head.mid", "queries.outliers.head.low", "keys.residual.1x*"):
        with pytest.raises(ArtifactError, match="no calibrator of"):
            toy_artifact(tensors={}).tensor(other)
