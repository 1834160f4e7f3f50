"""Launches of kernels as their launch functions make them: counted, compared, or not carried out at all."""

import importlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

KERNELS = Path(__file__).parents[2] / "kernels"
OPERATIONS = sorted(path.parent.name for path in KERNELS.glob("*/triton.py"))

# The kernels that are launched, and what each writes: filled, where none runs, with 0 if it is a position or a code
# and 1 elsewhere.
WRITTEN = {
    "attend": ("TOP", "MASS", "MIXED", "SCORES"),
    "merge": ("TOP_ALL", "MASS_ALL", "MIXED_ALL"),
    "exact": ("OUT", "TOLD", "NORMALISER"),
    "_attend": ("top", "mass", "mixed"),
    "token_groups": ("words", "parameters", "words_1", "parameters_1"),
    "by_planes": ("words", "parameters"),
    "rows_of_probes": ("asked", "normalisers"),
    "row_normalisers": ("normalisers",),
    "column_sums": ("mass",),
    "sum_rows": tuple(f"MASS_{i}" for i in range(4)),
    "largest": ("chosen", "others"),
    "choose": ("FOUND",),
    "move": tuple(f"LOST_{i}" for i in range(6)),
    "hide": ("REPLACED", "UNSEEN"),
    "exchange_entries": ("numbers", "slots", "new"),
    "gather_rows": (),
    "put": (),
    "split_atoms": ("high", "low"),
    "pursue": ("index", "coefficient"),
    "search": ("WORDS",),
    "project": ("WORDS", "COMPONENTS", "NUMBERS"),
    "take_off": ("OUT",),
    "score_terms": ("BIAS",),
    "mixture_terms": ("MIXED",),
    "list_scores": ("BIAS",),
    "list_mixtures": ("MIXED",),
    "turn_back": ("UNROTATED",),
    "channel_extremes": ("EXTREMES",),
    "channel_numbers": ("CENTER", "NUMBERS"),
}


@dataclass(frozen=True)
class Launch:
    """One launch. `arguments` by name, tensors included."""

    kernel: str
    grid: tuple[Any, ...]
    arguments: dict[str, Any]

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything but tensors."""
        return {name: part for name, part in self.arguments.items() if not isinstance(part, Tensor)}

    @property
    def fixed(self) -> dict[str, Any]:
        """What a recorded launch could not change: the grid, all numbers, and of tensors all but content and position."""
        tensors = {
            name: (part.shape, part.stride(), part.dtype)
            for name, part in self.arguments.items()
            if isinstance(part, Tensor)
        }
        return {"kernel": self.kernel, "grid": self.grid} | self.numbers | tensors


class Watched:
    """A kernel whose launches are listed; without `runs` it only fills what it would have written. With `copies` what it would read
    is listed as it is now, and what it fills is filled with other numbers each time."""

    def __init__(self, kernel: Any, found: list[Launch], runs: bool, copies: bool = False) -> None:
        self.kernel, self.found, self.runs, self.copies = kernel, found, runs, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[Any, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[Any, ...], *arguments: Any, **options: Any) -> None:
        named = dict(zip(self.kernel.arg_names, arguments, strict=False)) | options
        launch, written = Launch(self.kernel.__name__, grid, named), WRITTEN[self.kernel.__name__]
        if self.copies:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                read = {name: _copied(part) for name, part in named.items() if name not in written}
            launch = Launch(launch.kernel, grid, read)
        self.found.append(launch)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if self.runs:
                self.kernel[grid](*arguments, **options)
                return
            for number, name in enumerate(written):
                if isinstance(named[name], Tensor):
                    value = 1 + self.copies * (len(self.found) + number / 16)
                    named[name].fill_(value if named[name].is_floating_point() else 0)


def _copied(part: Any) -> Any:
    """With all of its memory: a kernel may be told other strides."""
    if not isinstance(part, Tensor):
        return part
    whole = torch.empty(0, dtype=part.dtype).set_(
        part.untyped_storage().clone(), part.storage_offset(), part.shape, part.stride()
    )
    return whole


def module_of(operation: str) -> ModuleType:
    """The launch functions of an operation."""
    return importlib.import_module(f"calib.kernels.{operation}.triton")


def watch(monkeypatch: Any, *operations: str, runs: bool = True, copies: bool = False) -> list[Launch]:
    """The launches of these operations' kernels, or of all operations', from now on."""
    found: list[Launch] = []
    for operation in operations or OPERATIONS:
        for path in sorted((KERNELS / operation).glob("*triton.py")):
            module = importlib.import_module(f"calib.kernels.{operation}.{path.stem}")
            for name, kernel in list(vars(module).items()):
                if name in WRITTEN and hasattr(kernel, "arg_names"):  # others are functions that kernels call
                    monkeypatch.setattr(module, name, Watched(kernel, found, runs, copies))
    return found


def alone(monkeypatch: Any, *operations: str) -> None:
    """From now on all but these operations take their plain form, whatever the variable says."""
    for operation in set(OPERATIONS) - set(operations):
        module = importlib.import_module(f"calib.kernels.{operation}.operation")
        monkeypatch.setattr(module, "prefers_triton", lambda device: False)


def counts(launches: list[Launch]) -> Counter[str]:
    """How often each kernel was launched."""
    return Counter(launch.kernel for launch in launches)
