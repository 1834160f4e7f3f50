"""What GEAR's calibrated forms read: outlier thresholds and residual bases against their definitions in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from tolerances import FLOAT32_FOLD
from toy_layer_sample import SHAPE, rows_of, sample

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.fit.metrics import tail_ratio
from calib.statistics import outlier_thresholds
from calib.statistics.outlier_thresholds import OutlierThresholds, thresholds
from calib.statistics.residual_basis import ResidualBasis, leading, residual_forms, without_outliers

pytestmark = pytest.mark.arithmetic

ALL = {stream: ["*x1", "1x*", "*x*", "half", "64x1", "20x1", "64x8"] for stream in ("keys", "values")}
FORMS = {(form.stream, form.name): form for form in residual_forms(32, ALL)}


def seen(statistic, *samples):
    for one in samples:
        statistic.observe(one)
    return statistic


# ---- outlier thresholds


def test_thresholds_are_order_statistics_of_the_real_tokens():
    one = sample(padding=(0, 20))
    one.keys[1, :, :20] = 1e9
    found = seen(OutlierThresholds(SHAPE, seed=0, shares=(0.02, 0.3)), one).tensors()
    assert torch.equal(found["outliers.shares"], torch.tensor([0.02, 0.3]))
    assert len(found) == 13
    real = [(row, t) for row in range(2) for t in range(64) if bool(one.mask[row, t])]
    for stream in ("keys", "values"):
        x = getattr(one, stream)
        for number, share in enumerate((0.02, 0.3)):
            for part, position, entries in (
                ("channel", (0, 1, 7), [x[row, 1, t, 7].item() for row, t in real]),
                ("head", (0, 1), [x[row, 1, t, c].item() for row, t in real for c in range(32)]),
                ("layer", (0,), [x[row, h, t, c].item() for row, t in real for h in range(2) for c in range(32)]),
            ):
                outside = math.floor(share * len(entries) / 2)
                low, high = (
                    found[f"{stream}.outliers.{part}.{end}"][(*position, number)].item() for end in ("low", "high")
                )
                assert (low, high) == (sorted(entries)[outside], sorted(entries, reverse=True)[outside])


@settings(max_examples=examples(50), deadline=None)
@given(
    x=st.lists(st.integers(-5, 5), max_size=40),
    shares=st.lists(st.floats(1e-6, 1 - 1e-6), min_size=1, max_size=3, unique=True).map(sorted),
)
def test_at_most_half_the_share_lies_outside_on_either_side(x, shares):
    row = torch.tensor(x, dtype=torch.float32)
    low, high = thresholds(row, shares)
    assert bool((low <= high).all())
    for share, least, most in zip(shares, low, high, strict=True):
        assert max(int((row < least).sum()), int((row > most).sum())) <= share * len(x) / 2
    if not x:
        assert not low.any()


def test_a_sample_of_a_long_text_stands_for_it(monkeypatch):
    monkeypatch.setattr(outlier_thresholds, "TOKENS", 512)
    one = sample(batch=20, tokens=200)
    found = seen(OutlierThresholds(SHAPE, seed=0, shares=(0.1,)), one).tensors()
    # 25 of 512 sampled entries lie outside on each side: a share of .05 of all, deviation .0095 at worst.
    for end, beyond in (("low", torch.lt), ("high", torch.gt)):
        threshold = found[f"keys.outliers.channel.{end}"][0, :, :, 0]
        share = beyond(one.keys.transpose(1, 2), threshold).float().mean((0, 1))
        assert ((share - 0.05).abs() < 5 * 0.0095).all()
        assert abs(share.mean() - 0.05) < 0.01


def test_the_tail_is_the_largest_over_a_percentile():
    x = torch.arange(-2000.0, 0.0)
    assert tail_ratio(3000.0, x) == 3000 / 1998
    assert tail_ratio(5.0, torch.zeros(7)) == 1
    assert tail_ratio(0.0, torch.zeros(0)) == 1


# ---- residual bases


def decoded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """One group of any shape, quantised in float64 with parameters rounded to float16."""
    low, high = x.min(), x.max()
    scale, zero = ((high - low) / (2**bits - 1)).half().double(), low.half().double()
    codes = ((x - zero) / scale).add(0.5).floor().clamp(0, 2**bits - 1) if scale > 0 else torch.zeros_like(x)
    return codes * scale + zero


def residual(x: torch.Tensor, stream: str, group: tuple[int | None, int | None], bits: int) -> torch.Tensor:
    """Return what quantisation loses of one head's `x [T, D]` without its outliers, in float64, row by row and group by group."""
    tokens, channels = x.shape
    filled, outlier = x.clone(), torch.zeros_like(x, dtype=torch.bool)
    for row in range(channels if stream == "keys" else tokens):
        position = (slice(None), row) if stream == "keys" else (row, slice(None))
        order = x[position].argsort()
        count = max(1, int(0.01 * len(order)))
        chosen, rest = [*order[:count].tolist(), *order[-count:].tolist()], order[count:-count]
        filled[position][chosen] = x[position][rest].mean()
        outlier[position][chosen] = True
    step, width = group[0] or tokens, group[1] or channels
    result = torch.zeros_like(x)
    for t in range(0, tokens, step):
        for c in range(0, channels, width):
            block = filled[t : t + step, c : c + width]
            result[t : t + step, c : c + width] = block - decoded(block, bits)
    return result.masked_fill(outlier, 0)


@pytest.fixture(scope="module")
def bases():
    """A sample, and the tensors of its residual bases of every form at 2 and 4 bits."""
    one = sample(batch=2, tokens=130)
    one.keys.add_(5)  # 0 is far outside: outliers filled with it would show
    one.values.add_(5)
    return one, seen(ResidualBasis(SHAPE, (2, 4), rank=6, forms=ALL), one).tensors()


def test_every_form_and_width_has_a_basis(bases):
    assert bases[1].keys() == {f"{stream}.residual.{form}.{bits}" for stream, form in FORMS for bits in (2, 4)}
    assert len(bases[1]) == 2 * 7 * 2


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("key", FORMS, ids=" ".join)
def test_a_basis_takes_all_that_any_basis_of_its_size_takes(bases, key, bits):
    """Against eigenvalues of the residual in float64; no value of this sample is so near a code's border that float32 differs."""
    one, found = bases
    stream, name = key
    basis = found[f"{stream}.residual.{name}.{bits}"]
    assert basis.shape == (2, 2, 6, 32)
    assert basis.dtype == torch.float32
    tokens = {64: 128, 20: 120}.get(FORMS[key].group[0], 130)
    for head in range(2):
        parts = [
            residual(getattr(one, stream)[row, head, :tokens].double(), stream, FORMS[key].group, bits)
            for row in range(2)
        ]
        moment = sum(part.T @ part for part in parts)
        vectors = basis[0, head].double()
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(6).double(), rtol=0, atol=1e-6)
        energies = torch.einsum("rd,de,re->r", vectors, moment, vectors)
        best = torch.linalg.eigvalsh(moment).flip(0)[:6]
        torch.testing.assert_close(energies, best, rtol=FLOAT32_FOLD, atol=0)


def test_signs_are_fixed_and_unseen_layers_and_dead_heads_have_unit_vectors():
    one = sample()
    one.values[:, 1] = 0
    found = seen(ResidualBasis(SHAPE), one).tensors()
    for name, basis in found.items():
        largest = basis.gather(-1, basis.abs().argmax(-1, keepdim=True))
        assert bool((largest > 0).all()), name
        assert torch.equal(basis[1], torch.eye(32)[:8].expand(2, 8, 32)), name
        if name.startswith("values"):
            assert torch.equal(basis[0, 1], torch.eye(32)[:8]), name
    other = leading(torch.diag(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)), 2)
    assert other.tolist() == [[0, 1, 0], [0, 0, 1]]


def test_groups_of_tokens_take_whole_groups_alone():
    one = sample(tokens=100)
    found, cut = (seen(ResidualBasis(SHAPE), part).tensors() for part in (one, rows_of(one, slice(None), slice(64))))
    for bits in (2, 4):
        assert torch.equal(found[f"keys.residual.64x1.{bits}"], cut[f"keys.residual.64x1.{bits}"])
        assert not torch.equal(found[f"keys.residual.*x1.{bits}"], cut[f"keys.residual.*x1.{bits}"])
    short = seen(ResidualBasis(SHAPE), sample(tokens=63)).tensors()
    assert found.keys() - short.keys() == {"keys.residual.64x1.2", "keys.residual.64x1.4"}


def test_a_width_beside_others_is_the_width_alone():
    one = sample(tokens=96, padding=(0, 7))
    together = seen(ResidualBasis(SHAPE, (1, 3, 8)), one).tensors()
    alone = [seen(ResidualBasis(SHAPE, (bits,)), one).tensors() for bits in (1, 3, 8)]
    assert together.keys() == set().union(*alone)
    for tensors in alone:
        assert all(torch.equal(together[name], basis) for name, basis in tensors.items())
    assert not torch.equal(together["values.residual.1x*.1"], together["values.residual.1x*.8"])


@pytest.mark.parametrize("forms", [{"keys": [], "values": []}, {}])
def test_no_forms_cost_nothing(forms, monkeypatch):
    none = ResidualBasis(SHAPE, forms=forms)
    assert not list(none.buffers())
    monkeypatch.setattr(LayerSample, "without_padding", lambda _: pytest.fail("the sample was read"))
    none.observe(sample())
    assert none.tensors() == {}


def test_a_stream_may_have_none():
    found = seen(ResidualBasis(SHAPE, forms={"keys": [], "values": ["half"]}), sample()).tensors()
    assert found.keys() == {"values.residual.1x16.2", "values.residual.1x16.4"}
    assert seen(ResidualBasis(SHAPE, forms={"keys": ["*x*"]}), sample()).tensors().keys() == {
        "keys.residual.*x*.2", "keys.residual.*x*.4"
    }  # fmt: skip


def test_sequences_of_a_token_or_two():
    for tokens in (1, 2, 3):
        found = seen(ResidualBasis(SHAPE), sample(tokens=tokens)).tensors()
        assert all(bool(basis.isfinite().all()) for basis in found.values())
    x = torch.tensor([[[[1.0], [5.0]]]])
    filled, outlier = without_outliers(x, "keys")  # two tokens: both are outliers, and nothing is left to have a mean
    assert outlier.all()
    assert not filled.any()
    filled, outlier = without_outliers(x, "values")  # rows of one channel have none
    assert not outlier.any()
    assert torch.equal(filled, x)


@pytest.mark.parametrize(
    ("head_dim", "keys", "values"),
    [
        (32, ["*x1", "64x1", "*x*", "1x16"], ["1x*", "*x*", "1x16"]),
        (64, ["*x1", "64x1", "*x*", "1x32"], ["1x*", "*x*", "1x32"]),
        (96, ["*x1", "64x1", "*x*", "1x48"], ["1x*", "*x*", "1x48"]),
        (128, ["*x1", "64x1", "*x*", "1x64"], ["1x*", "1x64", "*x*"]),
        (33, ["*x1", "64x1", "*x*"], ["1x*", "*x*"]),
    ],
)
def test_forms_are_those_that_divide_a_head(head_dim, keys, values):
    found = residual_forms(head_dim)
    assert [form.name for form in found if form.stream == "keys"] == keys
    assert [form.name for form in found if form.stream == "values"] == values


def test_a_whole_head_has_one_name():
    found = residual_forms(
        64, {"keys": ["1x64", "1x*", "*x64", "32x128", "1x1000"], "values": ["half", "1x32", "half"]}
    )
    assert [(form.stream, form.name, form.group) for form in found] == [
        ("keys", "1x*", (1, None)),
        ("keys", "*x*", (None, None)),
        ("keys", "32x*", (32, None)),
        ("values", "1x32", (1, 32)),
    ]


def test_a_basis_has_at_most_head_dim_vectors():
    assert ResidualBasis(Shape(1, 1, 1, 4)).rank == 4
    assert ResidualBasis(SHAPE, rank=3).rank == 3
