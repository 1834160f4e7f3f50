"""Batch rows as an index without synchronisation: indexing with a list copies it to the device, and that copy waits."""

import torch
from torch import Tensor

from calib.kernels.upload import upload


def row_index(rows: list[int], device: torch.device) -> slice | Tensor:
    """A slice where `rows` are consecutive, so that indexing gives a view; else int64 `[len(rows)]` on `device`."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return upload(rows, torch.int64, device)
