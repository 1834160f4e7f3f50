"""Small tensors that are made once and that a captured CUDA graph reads at their addresses."""

import pytest
import torch

from calib.kernels.pack.heads import first_words
from calib.runtime.stages.codec.uniform import _of_number
from calib.runtime.stages.codec.word_codes import _of_widths

CPU = torch.device("cpu")
MADE = {
    "first words": lambda number: first_words((number, 1), CPU),
    "of a clip": lambda number: _of_number(1 / (2 + number), 4, CPU),
    "levels of components": lambda number: _of_widths((4, 4), 1 + number, CPU),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_they_stay_however_many_others_are_made(made):
    """Layers have tables of their own: two models have more than 128, after which a default cache drops the oldest."""
    first = made(0)
    for number in range(1, 300):
        made(number)
    assert made(0) is first
