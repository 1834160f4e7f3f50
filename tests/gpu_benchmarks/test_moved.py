"""`moved` takes all tensors of a test's arguments to the GPU. On a CPU, where nothing has to move, a forgotten one is not seen."""

from dataclasses import dataclass

import pytest
import torch
from gpu.moved import moved

pytestmark = pytest.mark.arithmetic


@dataclass(frozen=True)
class Part:
    numbers: torch.Tensor
    name: str = "part"


def test_every_tensor_is_moved():
    x = torch.ones(2)
    found = moved((x, [x, (x, None)], {"codes": x, "nested": {"parts": [x]}}, Part(x), Part, 3), "meta")
    one, (two, (three, none)), block, part, kind, number = found
    tensors = (one, two, three, block["codes"], *block["nested"]["parts"], part.numbers)
    assert len(tensors) == 6 and all(own.is_meta for own in tensors)
    assert none is None and part.name == "part" and kind is Part and number == 3
