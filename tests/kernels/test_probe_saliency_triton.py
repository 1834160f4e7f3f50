"""Attention mass of probes by the interpreted kernels against plain torch, within FLOAT32_ATTENTION: widths, heads, masks,
lengths."""

import pytest
import torch
from tolerances import FLOAT32_ATTENTION
from torch import Tensor

from calib.kernels.probe_saliency import operation, reference

pytestmark = pytest.mark.arithmetic

triton = pytest.importorskip("calib.kernels.probe_saliency.triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed."""
    empty = torch.empty
    monkeypatch.setattr(triton.torch, "empty", lambda *shape, **of: empty(*shape, **of).fill_(torch.nan))


def amid_nan(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Random numbers, with NaN in memory before, between and behind the vectors."""
    around = torch.full((shape[0], shape[2] + 3, shape[1], shape[3] + 5), torch.nan, dtype=dtype)
    inside = around.transpose(1, 2)[:, :, 1:-2, 2:-3]
    return inside.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def drawn(rows: int, heads: int, kv_heads: int, tokens: int, width: int, probes: int, dtype: torch.dtype) -> tuple:
    query = amid_nan(rows, heads, probes, width, seed=0, dtype=dtype)
    keys = amid_nan(rows, kv_heads, tokens, width, seed=1, dtype=dtype)
    # Half of the probes are the newest tokens, the others random ones, as in ZipCache.
    others = torch.randperm(tokens - probes // 2, generator=torch.Generator().manual_seed(2))[: probes - probes // 2]
    return query, keys, torch.cat([others.sort().values, torch.arange(tokens - probes // 2, tokens)])


def agree(query: Tensor, keys: Tensor, positions: Tensor, scale: float, *options: object) -> None:
    found = triton.attention_mass(query, keys, positions, scale, *options)
    expected = reference.attention_mass(query, keys, positions, scale, *options)
    assert (found.shape, found.dtype) == (expected.shape, torch.float32)
    assert (found - expected).abs().max() <= FLOAT32_ATTENTION * expected.max()
    assert ((expected > 0) | (found == 0)).all()  # exactly 0 for keys that no probe sees


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
def test_every_width_and_dtype(width, dtype):
    agree(*drawn(1, 2, 1, 137, width, 35, dtype), 2 * width**-0.5)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_heads_of_a_group_and_rows(group):
    agree(*drawn(2, 2 * group, 2, 70, 32, 9, torch.float16), 0.4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "probes"), [(1, 1), (2, 1), (63, 63), (128, 128), (129, 64), (1000, 1)])
def test_odd_lengths(tokens, probes, dtype):
    agree(*drawn(1, 1, 1, tokens, 32, probes, dtype), 0.5)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)], ids=str)
def test_many_tiles_of_either(capability, monkeypatch):
    monkeypatch.setattr(triton, "capability_of", lambda device: capability)
    assert triton.tiles_of(128, torch.float16, capability).owned == (128 if capability >= (9, 0) else 256)
    agree(*drawn(1, 2, 1, 1000, 32, 200, torch.float16), 0.5)


MASKS = {
    "softcap": (3.0,),
    "softcap, a window of 1": (3.0, 1),
    "window": (None, 66),  # the last probe that sees a tile begins a tile of probes
    "window longer than all": (None, 5000),
    "behind": (None, None, (1, 50)),
    "behind, from far": (None, None, (40, 9999)),
    "behind, nothing": (None, None, (9, 8)),
    "behind, within a window": (None, 90, (0, 60)),
    "behind, further than a window": (5.0, 33, (3, 60)),
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("tokens", "probes", "dtype"), [(300, 40, torch.float16), (300, 300, torch.float16), (130, 20, torch.float32)]
)
def test_every_mask(options, tokens, probes, dtype):
    """All masks; with 300 probes every query of the prompt is a probe."""
    agree(*drawn(1, 1, 1, tokens, 32, probes, dtype), 0.5, *options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("softcap", "sliding", "behind"), [(None, None, None), (3.0, 66, None), (None, None, (1, 50))])
def test_rows_whose_sums_are_known(softcap, sliding, behind, dtype, monkeypatch):
    """With given log-sum-exps one pass over the keys suffices: `row_normalisers` is not launched, and the mass is the same."""
    query, keys, positions = drawn(2, 4, 2, 300, 32, 40, dtype)
    logits = query.float() @ keys.float().repeat_interleave(2, 1).mT * 0.5
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    apart = positions[:, None] - torch.arange(300)
    hidden = (apart < 0) | (apart >= (300 if sliding is None else sliding))
    known = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
    monkeypatch.setattr(triton, "row_normalisers", None)
    options = (0.5, softcap, sliding, behind)
    found = triton.attention_mass(query, keys, positions, *options, known)
    expected = reference.attention_mass(query, keys, positions, *options)
    assert (found - expected).abs().max() <= FLOAT32_ATTENTION * expected.max()


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "probes"), [(32, 1), (80, 130), (128, 299)])
def test_rows_are_chosen_from_those_of_all_keys(width, probes, dtype, summed, monkeypatch):
    """From the queries of all keys the kernel selects the probes itself; the mass has the same bits as if the caller selects
    them."""
    _, keys, positions = drawn(2, 4, 2, 300, width, probes, dtype)
    query = amid_nan(2, 4, 300, width, seed=3, dtype=dtype)
    sums = amid_nan(2, 4, 300, 1, seed=4, dtype=torch.float32)[..., 0] if summed else None
    if summed:
        monkeypatch.setattr(triton, "row_normalisers", None)
    own = None if sums is None else sums[:, :, positions]
    expected = triton.attention_mass(query[:, :, positions], keys, positions, 0.5, normalisers=own)
    assert torch.equal(triton.attention_mass(query, keys, positions, 0.5, normalisers=sums), expected)
    assert expected.isfinite().all() and expected.any()


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operation_takes_rows_of_all_keys(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    _, keys, positions = drawn(1, 2, 1, 50, 32, 9, torch.float16)
    query = amid_nan(1, 2, 50, 32, seed=3, dtype=torch.float16)
    found = operation.attention_mass(query, keys, positions, 0.5)
    expected = reference.attention_mass(query[:, :, positions], keys, positions, 0.5)
    assert (found - expected).abs().max() <= FLOAT32_ATTENTION * expected.max()


@pytest.mark.full
def test_probes_without_a_query_for_many_tiles():
    query, keys, _ = drawn(1, 1, 1, 500, 32, 4, torch.float16)
    for positions in ([0, 1, 2, 3], [0, 0, 499, 499], [127, 128, 129, 440], [130, 131, 300, 301]):
        for options in ((), (None, 20), (None, None, (1, 20))):
            agree(query, keys, torch.tensor(positions), 0.5, *options)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's tanh overflows internally
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_peaked_rows_stay_finite(softcap):
    """Logits of hundreds, of either sign, the largest at both ends. The tolerance is two roundings of a logit in float32, 2^-24
    each."""
    query, keys, positions = drawn(1, 2, 1, 300, 32, 20, torch.float16)
    keys *= torch.linspace(-20, 20, 300)[:, None]
    query *= 3
    largest = (query.float().norm(dim=-1).max() * keys.float().norm(dim=-1).max()).item()
    assert largest > 500
    found, expected = (form.attention_mass(query, keys, positions, 1.0, softcap) for form in (triton, reference))
    assert (found - expected).abs().max() <= 2 * 2**-24 * largest * expected.max()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # in scores that are masked afterwards
def test_hidden_keys_may_hold_anything():
    query, keys, _ = drawn(1, 2, 1, 300, 32, 20, torch.float16)
    keys[:, :, 200:] = 60000.0
    agree(query, keys, torch.arange(180, 200), 2.0)


def test_no_probe_and_no_token():
    query, keys, positions = drawn(1, 2, 1, 30, 32, 4, torch.float16)
    mass = triton.attention_mass(query[:, :, :0], keys, positions[:0], 1.0)
    assert mass.shape == (1, 1, 30) and not mass.any()
    assert triton.attention_mass(query[:0], keys[:0], positions, 1.0).shape == (0, 1, 30)


def test_channels_that_do_not_lie_together():
    query, keys, positions = drawn(1, 2, 1, 50, 32, 9, torch.float32)
    other = keys.mT.contiguous().mT
    assert other.stride(3) != 1
    agree(query, other, positions, 0.5)


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operation_runs_what_serves(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    asked = []
    original = triton.attention_mass
    monkeypatch.setattr(triton, "attention_mass", lambda *given: asked.append(given) or original(*given))
    query, keys, positions = drawn(1, 2, 1, 50, 32, 9, torch.float16)
    options = (4.0, 20, (1, 9))
    found = operation.attention_mass(query, keys, positions, 0.5, *options)
    assert len(asked) == (forced == "triton")
    expected = reference.attention_mass(query, keys, positions, 0.5, *options)
    assert (found - expected).abs().max() <= FLOAT32_ATTENTION * expected.max()
    # Not supported by the kernels: float64, mixed dtypes, a negative scale, wider heads.
    asked.clear()
    for given in (
        (query.double(), keys.double(), positions, 0.5),
        (query.float(), keys, positions, 0.5),
        (query, keys, positions, -0.5),
        (*drawn(1, 1, 1, 5, 300, 2, torch.float16), 0.5),
    ):
        assert torch.equal(operation.attention_mass(*given, *options), reference.attention_mass(*given, *options))
    assert not asked
