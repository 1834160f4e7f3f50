"""Basis transform and mixed-width codec of `klt`: codes that do not depend on the batch, exact folds, packing as specified."""

import re
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch

from calib.kernels.attend.reference import keys_of_codes
from calib.runtime.artifact.components import _inverse
from calib.runtime.stages.codec import MixedQuant
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.transform import Basis

pytestmark = pytest.mark.arithmetic

HEADS, CHANNELS = 3, 16
WIDTHS, COUNTS = (5, 4, 3, 2, 1, 1), (2, 0, 1)


def codec():
    return MixedQuant(WIDTHS, COUNTS)


def matrices(seed=0):
    """A mean `[HEADS, CHANNELS]`, E `[HEADS, CHANNELS, components]` and M, its inverse on the components that a head has words for;
    rows and columns of all other components are 0."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(HEADS, CHANNELS, CHANNELS, generator=draw, dtype=torch.float64)
    columns = torch.linalg.inv(rows)
    into = torch.zeros(HEADS, CHANNELS, codec().components, dtype=torch.float64)
    back = torch.zeros(HEADS, codec().components, CHANNELS, dtype=torch.float64)
    for head, count in enumerate(COUNTS):
        for plane in range(len(WIDTHS)):
            own, at = slice(plane * count, (plane + 1) * count), slice(2 * plane, 2 * plane + count)
            into[head, :, at], back[head, at] = rows[head, own].T / 8, columns[head][:, own].T * 8
    return torch.randn(HEADS, CHANNELS, generator=draw), into, back


def basis(seed=0):
    mean, into, back = matrices(seed)
    step, least = codec().step(mean.device), codec().least(mean.device)
    return Basis.of(mean, into, back, torch.ones(HEADS, CHANNELS), step, least)


def tokens(rows=2, count=50, seed=1, dtype=torch.float32):
    return torch.randn(rows, HEADS, count, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_components_are_those_of_the_matrix():
    mean, into, _ = matrices()
    x, transform = tokens(), basis()
    wanted = (x.double() - mean.double()[:, None]) @ into
    assert transform.components == wanted.shape[-1]
    assert (transform.forward(x) - wanted).abs().max() < 2e-3  # entries of 16 bits, 16 channels of up to 4


def test_the_way_back_is_the_matrix_that_was_given():
    """M is stored as `back` x `gain`; `back` x `size` is the change of the channels by one step of each component."""
    _, _, back = matrices()
    transform = basis()
    found = transform.back.double() * transform.gain.double().mT
    a_step = codec().step(back.device).double()[:, None]
    # `back` has float16 entries of magnitude 1 at most, relative to `size`.
    assert ((found - back) * a_step / transform.size.double()).abs().max() <= 2**-12
    assert torch.equal(transform.gain * a_step.mT, transform.size.expand_as(transform.gain))


def test_codes_and_a_one_make_what_decoding_and_the_way_back_make():
    transform, quant = basis(), codec()
    block = quant.encode(transform.forward(tokens()))
    wanted = transform.inverse(quant.decode(block, transform.components))
    matrix = transform.of_codes()
    found = keys_of_codes(block["words"].mT, WIDTHS, COUNTS, matrix)
    assert matrix.shape == (HEADS, CHANNELS, transform.components + 1)
    assert found.dtype == torch.float32 and (found.mT - wanted).abs().max() < 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("sized", [False, True])
def test_the_way_back_from_codes_is_exact(sized):
    """Decoding from codes is correct to the last bits of float32 (4 half units of the largest), and has the same bits for any order
    of components and any number of tokens."""
    draw, components = torch.Generator().manual_seed(7), 96
    # Codes of 8 bits and float16 entries of any magnitude up to 1: their exact sums have more bits than float32.
    back = (torch.rand(HEADS, components, CHANNELS, generator=draw) * 2 - 1) ** 3
    transform = replace(basis(), back=back.half(), sized=sized)
    codes = torch.randint(256, (HEADS, 300, components), generator=draw)
    sizes = 2.0 ** torch.randint(-2, 3, (HEADS, 300, 1), generator=draw) if sized else None
    found = transform.inverse_of_codes(codes, sizes)
    offset = (transform.origin.double() - transform.mean.double()) if sized else transform.origin.double()
    moved = codes.double() @ transform.back.double() * transform.size.double()
    wanted = (moved + offset) * sizes + transform.mean.double() if sized else moved + offset
    assert (found - wanted).abs().max() < 4 * 2**-24 * wanted.abs().max()
    order = torch.randperm(components, generator=draw)
    shuffled = replace(transform, back=transform.back[:, order])
    assert torch.equal(shuffled.inverse_of_codes(codes[..., order], sizes), found)
    parts = [
        transform.inverse_of_codes(codes[:, at], None if sizes is None else sizes[:, at])
        for at in (slice(1), slice(1, 300))
    ]
    assert torch.equal(torch.cat(parts, 1), found)


def test_mixed_codes_fold_to_what_mixed_components_fold_to():
    transform, quant = basis(), codec()
    tile = {"words": quant.encode(transform.forward(tokens()))["words"].mT}
    weights = torch.rand(2, HEADS, 3, 50, generator=torch.Generator().manual_seed(6))
    mass = weights.sum(-1, keepdim=True)
    wanted = transform.fold_output(quant.mix(weights, tile, transform.components), mass)
    found = transform.fold_codes(quant.mixed_codes(weights, tile), mass)
    assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_has_the_same_codes_in_any_company(dtype, monkeypatch):
    monkeypatch.setattr(MixedQuant, "piece", 2**14)
    x, transform, quant = tokens(4, 700, dtype=dtype), basis(), codec()

    def words(part):
        return quant.encode(transform.forward(part))["words"]

    together, generator = words(x), torch.Generator().manual_seed(5)
    alone = torch.cat([words(x[2:3, :, [token]]) for token in range(0, 700, 50)], 2)
    assert torch.equal(together[2:3, :, ::50], alone)
    order = torch.randperm(700, generator=generator)
    assert torch.equal(together[:, :, order], words(x[:, :, order]))
    assert torch.equal(together.flip(0), words(x.flip(0)))
    assert torch.equal(together[:, :, 100:407], words(x[:, :, 100:407].contiguous()))
    pieces = encoded(transform, quant, x, False, order.expand(4, HEADS, -1))
    assert torch.equal(pieces["words"], together[:, :, order])


def test_components_are_sums_of_whole_numbers():
    """Components are sums of whole numbers below 2^53, so they are exact and do not depend on the order of the sums."""
    x, transform = tokens(count=300), basis()
    whole = ((x - transform.mean) / transform.unit).round().long()
    exact = (whole @ transform.into.long()).double() * transform.scale.double()
    assert int(whole.abs().max()) * int(transform.into.abs().max()) * CHANNELS < 2**53
    assert torch.equal(transform.forward(x), exact.float())


def near(found: torch.Tensor, wanted: torch.Tensor, terms: torch.Tensor) -> bool:
    """Whether `found` is `wanted` up to the rounding of float32 sums: 2^-19 of the largest of `terms`, sums of magnitudes."""
    return bool(((found.double() - wanted.double()).abs() <= 2**-19 * terms.double().abs().max()).all())


def test_far_tokens_are_brought_in_and_nothing_overflows():
    transform = basis()
    y = transform.forward(torch.full((1, HEADS, 1, CHANNELS), 3e38))
    assert y.isfinite().all()
    assert torch.equal(y, transform.forward(torch.full((1, HEADS, 1, CHANNELS), 1e6)))


def test_folds_are_the_transform_undone():
    transform, draw = basis(), torch.Generator().manual_seed(6)
    y = torch.rand(2, HEADS, 30, transform.components, generator=draw) * 2 - 1
    x = oracle.undone(type("", (), {"stage": transform, "measured": None}), 0, y.double())
    sizes = (y.abs() * transform.gain) @ transform.back.float().abs() + transform.mean.abs()
    assert near(transform.inverse(y), x, sizes)
    query = torch.randn(2, HEADS, 4, CHANNELS, generator=draw)
    folded, constant = transform.fold_query(query)
    assert near(folded @ y.mT + constant, query.double() @ x.mT, query.abs() @ sizes.mT)
    weights = torch.rand(2, HEADS, 4, 30, generator=draw)
    mixed = transform.fold_output(weights @ y, weights.sum(-1, keepdim=True))
    assert near(mixed, weights.double() @ x, weights @ sizes)


def test_words_hold_what_was_encoded():
    quant = codec()
    y = torch.rand(2, HEADS, 40, quant.components, generator=torch.Generator().manual_seed(2)) * 3 - 1.5
    block = quant.encode(y)
    (field,) = quant.fields(CHANNELS, torch.bfloat16).values()
    assert block["words"].shape == (2, 1, 40, sum(COUNTS)) and field.width == sum(COUNTS) and field.shared
    held = oracle.mixed(block["words"].numpy(), WIDTHS, COUNTS)
    for head, count in enumerate(COUNTS):
        for plane, width in enumerate(WIDTHS):
            own, most = slice(2 * plane, 2 * plane + count), 2**width - 1
            given = y[:, head, :, own].double().numpy()
            nearest = ((given * 2 ** (width - 1) + most / 2).round().clip(0, most) - most / 2) / 2 ** (width - 1)
            assert abs(held[:, head, :, own] - nearest).max(initial=0) < 1e-9
            assert abs(quant.decode(block, CHANNELS)[:, head, :, own].numpy() - nearest).max(initial=0) < 1e-6


def test_attention_on_words_is_attention_on_what_they_hold():
    quant, transform, draw = codec(), basis(), torch.Generator().manual_seed(7)
    block = quant.encode(transform.forward(tokens()))
    held = torch.from_numpy(oracle.mixed(block["words"].numpy(), WIDTHS, COUNTS)).nan_to_num()
    query = transform.fold_query(torch.randn(2, HEADS, 5, CHANNELS, generator=draw))[0]
    tile = {"words": block["words"].mT.contiguous()}
    sizes = query.abs().sum(-1, keepdim=True)
    assert near(quant.scores(query, tile), query.double() @ held.mT, sizes)
    weights = torch.rand(2, HEADS, 5, 50, generator=draw)
    mass = weights.sum(-1, keepdim=True)
    mixed = quant.mix(weights, tile, CHANNELS)
    own = (transform.back != 0).any(-1)[:, None]  # for components without a word `mix` may return another head's
    assert near(mixed * own, (weights.double() @ held) * own, mass)


def test_an_inverse_is_right_whatever_the_number_of_threads():
    """MKL's LU of 256 x 256 float64 matrices is wrong once the number of threads was set to 2 or more: the package does not call
    it, and the inverse of a basis is right to 1e-9."""
    root = Path(__file__).parents[2]
    for folder in ("runtime", "kernels", "calib", "benchmarks"):  # each by itself: `rglob` follows no links
        files = list((root / folder).rglob("*.py"))
        assert len(files) > 20, folder
        for file in files:
            assert not re.search(r"linalg\.(inv|solve|solve_ex|lu\w*)\(", file.read_text()), file
    threads = torch.get_num_threads()
    rows = torch.randn(2, 256, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        torch.set_num_threads(2)
        found = _inverse("keys.klt.basis", 0, rows)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found @ rows, torch.eye(256, dtype=torch.float64).expand(2, -1, -1), rtol=0, atol=1e-9)
