"""Launches over prompts of two million tokens, recorded but not run: CUDA limits every axis of programs but the first to 65,535."""

import pytest
import torch
from component_inputs import basis_of, codecs, prediction_of

from calib.kernels.launch import LaunchedBy

for operation in ("components", "predictions", "trellis"):
    pytest.importorskip(f"calib.kernels.{operation}.triton", reason="Triton is not installed")

WIDTHS, COUNTS, TOKENS, CHANNELS = (8, 8), (1,), 2**21 + 1, 2
MOST = 65_535


def launched(call, monkeypatch) -> list:
    """The launches of `call` with Triton's kernels."""
    found = []
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    with LaunchedBy(found.append):
        call()
    monkeypatch.delenv("CALIB_KERNELS")
    return found


def test_components_and_trellis(monkeypatch):
    """The words of a trellis are found by a launch of their own."""
    basis, tokens = basis_of(WIDTHS, COUNTS, CHANNELS), torch.zeros(1, 1, 1, CHANNELS).expand(1, 1, TOKENS, CHANNELS)
    codec = codecs(WIDTHS, COUNTS)["trellis"]
    found = launched(lambda: codec.projected(tokens, basis.projection()), monkeypatch)
    assert [one.kernel.__name__ for one in found] == ["project", "search"]
    assert all(max(one.grid[1:], default=1) <= MOST for one in found)


def test_predictions(monkeypatch):
    codec = codecs(WIDTHS, COUNTS)["sized"]
    keys = {"words": torch.zeros(1, 1, TOKENS, 1, dtype=torch.int16)}
    keys["sizes"] = torch.zeros(1, 1, TOKENS, 1, dtype=codec.dtype)
    values = torch.zeros(1, 1, 1, CHANNELS).expand(1, 1, TOKENS, CHANNELS)
    prediction = prediction_of(WIDTHS, COUNTS, CHANNELS)
    (found,) = launched(lambda: prediction.taken_off(values, codec, keys), monkeypatch)
    assert found.kernel.__name__ == "take_off" and max(found.grid[1:], default=1) <= MOST
