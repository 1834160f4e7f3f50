"""The cells of the contract's matrix, and the sample of them that every test run takes."""

import random
from itertools import combinations, product

import torch
from cases import CASES
from contract.architectures import ARCHITECTURES
from contract.cell import Cell
from contract.modes import MODES

METHODS = [case.name for case in CASES if case.contract]
SHORT = [torch.bfloat16, torch.float16]
SAMPLED = 48

# By architecture first, so that neighbouring cells share a model and its shadow.
CELLS = [
    Cell(method, mode, architecture.name) for architecture, mode, method in product(ARCHITECTURES, MODES, METHODS)
] + [
    Cell(method, "greedy ragged", architecture.name, dtype)
    for dtype, architecture, method in product(SHORT, ARCHITECTURES, METHODS)
]


def sample(count: int = SAMPLED) -> list[Cell]:
    """`count` cells, always the same, chosen greedily to cover most pairs of entries (method, mode, architecture, dtype).

    Every entry of the tables is in some cell, because a new entry adds the most new pairs.
    """
    left = {cell: pairs(cell) for cell in random.Random(0).sample(CELLS, len(CELLS))}
    missing = set().union(*left.values())
    chosen = []
    for _ in range(count):
        best = max(left, key=lambda cell: len(left[cell] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


def pairs(cell: Cell) -> set[tuple[str, ...]]:
    """All pairs of the cell's entries."""
    entries = (f"method {cell.method}", f"mode {cell.mode}", f"architecture {cell.architecture}", str(cell.dtype))
    return set(combinations(entries, 2))
