"""A tensor that several layers share, with one copy on each device."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SharedTable:
    """Holds `tensor`; `on` returns the same copy on a device to all layers, and a deep copy is the table itself."""

    tensor: Tensor

    def on(self, device: torch.device) -> "SharedTable":
        """The table on `device`; the table itself if it is there already."""
        if self.tensor.device == device:
            return self
        to_device = self._elsewhere.get(device)
        if to_device is None:
            to_device = self._elsewhere[device] = SharedTable(self.tensor.to(device))
        return to_device

    @cached_property
    def _elsewhere(self) -> "WeakValueDictionary[torch.device, SharedTable]":
        return WeakValueDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedTable":
        return self
