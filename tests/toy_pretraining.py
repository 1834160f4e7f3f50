"""A little text and a curriculum of ten steps: pretraining at toy size."""

import torch

from calib.testbed.curriculum import Curriculum, Phase

PROSE = "The river ran past the mill, and nobody there could say how old the mill was in 1906.\n"
PHASES = [Phase(0.5, rows=6, length=64, text=0.0, copying=0.5), Phase(0.5, rows=4, length=96, text=0.5)]


def curriculum(tokenizer, steps=10, seed=0):
    text = torch.arange(300, 1300).to(torch.uint16).numpy()
    return Curriculum(PHASES, steps, tokenizer, text, seed)
