"""Decode steps by the compiled CPU kernels of attention, against the same steps in plain torch."""

import os
import shutil

import pytest
import torch
from tolerances import FORWARD
from toy_models import left_padded, random_model

from calib.kernels.attend import pages_cpu
from calib.runtime import compress

PROMPTS, STEPS = [200, 131, 17], 140  # one row has less than a page at first; all rows encode blocks in the steps


def decoded(model, options) -> torch.Tensor:
    """Logits of all steps `[steps, rows, vocabulary]`, for the same tokens in every run."""
    inputs, found = left_padded(PROMPTS), []
    mask = inputs["attention_mask"]
    with torch.no_grad(), compress(model, **options) as cache:
        model(**inputs, past_key_values=cache)
        for tokens in left_padded([STEPS] * len(PROMPTS), seed=1)["input_ids"].split(1, 1):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions = mask.sum(-1, keepdim=True) - 1
            found.append(
                model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
            )
    return torch.stack(found)


@pytest.mark.full
@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))) and "CC" not in os.environ, reason="no C compiler"
)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "kivi", "bits": 2},
        {"method": "kivi", "bits": 4, "residual": {"keys": 32, "values": 128}},
        {"method": "rtn", "bits": 4},
    ],
    ids=["kivi", "kivi-windows", "rtn"],
)
def test_rows_of_unequal_length_are_met_by_one_kernel(options, monkeypatch):
    """One call a step, whichever rows have packed tokens, and whichever of them have more packed keys than values. The model has
    one layer, so that what is stored does not depend on attention."""
    model, calls, attend_pages = random_model("llama", num_hidden_layers=1), [], pages_cpu.attend_pages

    def counted(*given):
        calls.append(given)
        return attend_pages(*given)

    monkeypatch.setattr(pages_cpu, "attend_pages", counted)
    monkeypatch.delenv("CALIB_KERNELS", raising=False)
    found = decoded(model, options)
    assert len(calls) == STEPS
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    expected = decoded(model, options)
    assert len(calls) == STEPS
    assert (found - expected).abs().max() <= FORWARD[torch.float32] * expected.abs().max()
