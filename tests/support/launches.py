"""Records kernel launches of the launch functions, to count and compare them, with or without running the kernels."""

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

# All kernels that are launched, and the arguments that each writes. Where kernels do not run, integers (codes, positions) are
# filled with 0 and floats with 1.
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
    """One launch of `kernel`; `arguments` are by name, tensors included."""

    kernel: str
    grid: tuple[Any, ...]
    arguments: dict[str, Any]

    @property
    def numbers(self) -> dict[str, Any]:
        """The arguments that are no tensors."""
        return {name: part for name, part in self.arguments.items() if not isinstance(part, Tensor)}

    @property
    def fixed(self) -> dict[str, Any]:
        """Everything that is fixed when the launch is recorded in a CUDA graph: kernel, grid, all numbers, and shapes, strides and
        dtypes of tensors."""
        tensors = {
            name: (part.shape, part.stride(), part.dtype)
            for name, part in self.arguments.items()
            if isinstance(part, Tensor)
        }
        return {"kernel": self.kernel, "grid": self.grid} | self.numbers | tensors


class Watched:
    """A kernel whose launches are added to `found`. Without `runs` it does not run, and its outputs are filled (see WRITTEN). With
    `copies` the launch holds copies of the inputs, and floats are filled with another number at each launch."""

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
    """A copy of a tensor's whole storage: a kernel may read it with other strides."""
    if not isinstance(part, Tensor):
        return part
    whole = torch.empty(0, dtype=part.dtype).set_(
        part.untyped_storage().clone(), part.storage_offset(), part.shape, part.stride()
    )
    return whole


def module_of(operation: str) -> ModuleType:
    """The module with the launch functions of an operation."""
    return importlib.import_module(f"calib.kernels.{operation}.triton")


def watch(monkeypatch: Any, *operations: str, runs: bool = True, copies: bool = False) -> list[Launch]:
    """Return a list to which every later launch of these operations' kernels (of all operations, if none is named) is added."""
    found: list[Launch] = []
    for operation in operations or OPERATIONS:
        for path in sorted((KERNELS / operation).glob("*triton.py")):
            module = importlib.import_module(f"calib.kernels.{operation}.{path.stem}")
            for name, kernel in list(vars(module).items()):
                if name in WRITTEN and hasattr(kernel, "arg_names"):  # others are functions that kernels call
                    monkeypatch.setattr(module, name, Watched(kernel, found, runs, copies))
    return found


def alone(monkeypatch: Any, *operations: str) -> None:
    """From now on all other operations run in plain torch, whatever the environment variable for Triton says."""
    for operation in set(OPERATIONS) - set(operations):
        module = importlib.import_module(f"calib.kernels.{operation}.operation")
        monkeypatch.setattr(module, "prefers_triton", lambda device: False)


def counts(launches: list[Launch]) -> Counter[str]:
    """How often each kernel was launched."""
    return Counter(launch.kernel for launch in launches)
