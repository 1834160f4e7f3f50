"""Linear layers of a 16-bit model that multiply in float32: rounded once, and nothing else changed."""

import pytest
import torch
from torch import nn
from toy_models import random_model

from calib.evaluate.products import multiply_in_float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_rounded_once(dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, bias=bias).to(dtype)
    x = torch.randn(7, 96).to(dtype)
    exact = nn.functional.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    multiply_in_float32(layer)
    found = layer(x)
    assert found.dtype == dtype and layer.weight.dtype == dtype
    assert (found.double() - exact).abs().le(0.5 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all()


def test_a_model_goes_on_in_its_dtype(monkeypatch):
    """All of its linear layers multiply in float32; its logits, and the keys that a cache gets, keep the dtype."""
    model = random_model("llama", torch.bfloat16)
    layers = sum(type(part) is nn.Linear for part in model.modules())
    dtypes, linear = [], nn.functional.linear

    def watched(x, weight, bias=None):
        dtypes.append((x.dtype, weight.dtype))
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", watched)
    ids = torch.randint(1, model.config.vocab_size, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids, use_cache=True)
        multiply_in_float32(model)
        after = model(ids, use_cache=True)
    assert dtypes == [(torch.bfloat16,) * 2] * layers + [(torch.float32,) * 2] * layers and layers > 2 * 7
    assert after.logits.dtype == torch.bfloat16 and after.past_key_values.layers[0].keys.dtype == torch.bfloat16
    assert (after.logits.float() - before.logits.float()).abs().max() <= 0.02 * before.logits.float().abs().max()


def test_a_float32_model_is_left_alone():
    model = random_model("llama")
    multiply_in_float32(model)
    assert all("forward" not in vars(part) for part in model.modules())
