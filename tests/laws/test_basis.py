"""The transform and the codec of `klt`: exact in its codes, folded without loss, packed as specified."""

import oracle
import pytest
import torch

from calib.runtime.stages.codec import MixedQuant
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.transform import Basis

pytestmark = pytest.mark.arithmetic

HEADS, CHANNELS = 3, 16
WIDTHS, COUNTS = (5, 4, 3, 2, 1, 1), (2, 0, 1)


def codec():
    return MixedQuant(WIDTHS, COUNTS)


def matrices(seed=0):
    """A mean, E and M as `klt` makes them: M undoes E on the components there are; nothing where a head has no word."""
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
    return Basis.of(mean, into, back, torch.ones(HEADS, CHANNELS))


def tokens(rows=2, count=50, seed=1, dtype=torch.float32):
    return torch.randn(rows, HEADS, count, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_components_are_those_of_the_matrix():
    mean, into, _ = matrices()
    x, transform = tokens(), basis()
    wanted = (x.double() - mean.double()[:, None]) @ into
    assert transform.components == wanted.shape[-1]
    assert (transform.forward(x) - wanted).abs().max() < 2e-3  # entries of 16 bits, 16 channels of up to 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_has_the_same_codes_in_any_company(dtype, monkeypatch):
    monkeypatch.setattr("calib.runtime.stages.codec.encoded.PIECE", 2**14)
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


def test_far_tokens_are_brought_in_and_nothing_overflows():
    transform = basis()
    y = transform.forward(torch.full((1, HEADS, 1, CHANNELS), 3e38))
    assert y.isfinite().all()
    assert torch.equal(y, transform.forward(torch.full((1, HEADS, 1, CHANNELS), 1e6)))


def test_folds_are_the_transform_undone():
    transform = basis()
    y = torch.rand(2, HEADS, 30, transform.components) * 2 - 1
    x = oracle.undone(type("", (), {"stage": transform, "measured": None}), 0, y.double())
    assert torch.allclose(transform.inverse(y).double(), x, atol=1e-4)
    query = torch.randn(2, HEADS, 4, CHANNELS)
    folded, constant = transform.fold_query(query)
    assert torch.allclose((folded @ y.mT + constant).double(), query.double() @ x.mT, atol=2e-4)
    weights = torch.rand(2, HEADS, 4, 30)
    mixed = transform.fold_output(weights @ y, weights.sum(-1, keepdim=True))
    assert torch.allclose(mixed.double(), weights.double() @ x, atol=2e-4)


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
            nearest = (2 * ((given + 1) * most / 2).round().clip(0, most) / most) - 1
            assert abs(held[:, head, :, own] - nearest).max(initial=0) < 1e-9
            assert abs(quant.decode(block, CHANNELS)[:, head, :, own].numpy() - nearest).max(initial=0) < 1e-6


def test_attention_on_words_is_attention_on_what_they_hold():
    quant, transform = codec(), basis()
    block = quant.encode(transform.forward(tokens()))
    held = torch.from_numpy(oracle.mixed(block["words"].numpy(), WIDTHS, COUNTS)).nan_to_num()
    query = transform.fold_query(torch.randn(2, HEADS, 5, CHANNELS))[0]
    tile = {"words": block["words"].mT.contiguous()}
    assert torch.allclose(quant.scores(query, tile).double(), query.double() @ held.mT, atol=1e-4)
    weights = torch.rand(2, HEADS, 5, 50)
    mixed = transform.fold_output(quant.mix(weights, tile, CHANNELS), weights.sum(-1, keepdim=True))
    wanted = transform.fold_output((weights.double() @ held).float(), weights.sum(-1, keepdim=True))
    assert torch.allclose(mixed, wanted, atol=1e-4)
