"""The name of a dtype in messages and files."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
