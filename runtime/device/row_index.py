"""Rows of a batch as an index that the host does not wait for: a list in brackets is copied to the device, and that copy waits."""

import torch
from torch import Tensor

from calib.kernels.upload import upload


def row_index(rows: list[int], device: torch.device) -> slice | Tensor:
    """A slice where `rows` follow each other, so that what it reads is a view; else int64 `[len(rows)]` on `device`."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return upload(rows, torch.int64, device)
