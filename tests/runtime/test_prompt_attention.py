"""A prompt's attention that returns its rows' log-sum-exp, which probes (ZipCache, MiKV, H2O, SnapKV) need not compute again."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.inputs import tokens
from benchmarks.gpu.layers import Heads, bare_layers, forward
from calib.kernels.probe_saliency import triton
from calib.runtime.attend import prompt_attention
from calib.runtime.attend.prompt_attention import prompt, prompt_normalised
from calib.runtime.attend.request import QKV, AttendRequest
from calib.runtime.logits import Logits

CPU = torch.device("cpu")


def request(heads: int = 4, kv_heads: int = 2, columns: int = 50, dtype: torch.dtype = torch.float32) -> AttendRequest:
    """A request of two rows that hold no tokens."""
    own = [tokens(2, count, columns, 32, seed, CPU, dtype) for seed, count in enumerate((heads, kv_heads, kv_heads))]
    return AttendRequest(None, range(2), Logits(0.3), QKV(*own))


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
def test_the_output_is_the_same_and_the_sums_are_right(heads, kv_heads, dtype, kernels):
    asked = request(heads, kv_heads, dtype=dtype)
    output, found = prompt_normalised(asked)
    assert torch.equal(output, prompt(asked))
    query, keys, _ = (part.double() for part in asked.given)
    logits = query @ keys.repeat_interleave(heads // kv_heads, 1).mT * 0.3
    expected = logits.masked_fill(~torch.ones(50, 50).tril().bool(), -torch.inf).logsumexp(-1)
    assert found.dtype == torch.float32
    # On a CPU torch's exponentials for 16 bits are right to 1e-4.
    limit = 1e-5 if dtype == torch.float32 else 1e-4
    assert (found.double() - expected).abs().max() <= limit * expected.abs().max()


def test_where_nobody_knows_them_they_are_none(kernels, monkeypatch):
    asked = request()
    with sdpa_kernel(SDPBackend.MATH):
        output, found = prompt_normalised(asked)
        assert found is None and torch.equal(output, prompt(asked))
    grown = asked._replace(given=QKV(*(part.clone().requires_grad_() for part in asked.given)))
    output, found = prompt_normalised(grown)
    assert found is None and output.requires_grad
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert prompt_normalised(asked)[1] is None


def test_cudnn_is_asked_for_a_sum_of_each_row(monkeypatch):
    """By shapes alone, on the meta device, which knows torch's GPU operators. cuDNN's log-sum-exp has a dimension more."""
    monkeypatch.setattr(prompt_attention, "_backend", lambda request: prompt_attention.CUDNN)
    asked = request(8, 2, dtype=torch.bfloat16)
    output, found = prompt_normalised(asked._replace(given=QKV(*(part.to("meta") for part in asked.given))))
    assert output.shape == (2, 8, 50, 32) and found.shape == (2, 8, 50) and found.dtype == torch.float32


def test_plain_torch_asks_for_none(monkeypatch):
    """Plain torch computes it again as fast."""
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    assert prompt_normalised(request())[1] is None


@pytest.mark.full
@pytest.mark.parametrize("method", ["zipcache", "mikv", "h2o", "snapkv"])
def test_what_a_method_stores_is_the_same(method, kernels, monkeypatch):
    """With rows of one length probes use the prompt's log-sum-exp, and the kernel that would compute it is not launched."""
    heads, seen = Heads(2, 4, 2, 32), []
    given = [tokens(2, count, 100, 32, seed, CPU, torch.float32) for seed, count in enumerate((4, 2, 2))]
    launched = []
    original = triton.row_normalisers
    monkeypatch.setattr(triton, "row_normalisers", _noted(original, launched))
    for known in (True, False):
        if not known:
            monkeypatch.setattr(prompt_attention, "_backend", lambda request: None)
        torch.manual_seed(0)
        layer = bare_layers(method, heads, 1)[0]
        output = forward(layer, *given)
        seen.append((output, layer.store.decoded(0), len(launched)))
    (output, held, first), (other, others, second) = seen
    assert first == 0 < second
    assert torch.equal(output, other)
    for one, two in zip(held, others, strict=True):
        for mine, theirs in zip(one, two, strict=True):
            torch.testing.assert_close(mine, theirs)


def _noted(kernel, launched):
    class Noted:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    return Noted()
