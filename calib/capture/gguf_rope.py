"""Finds the scaling of RoPE in a GGUF file. transformers reads it for one architecture only and leaves it out for all others,
whose keys would then be rotated by other angles than the model was trained with."""

from pathlib import Path
from typing import Any

import numpy as np

from calib.capture.model_files import ModelFiles
from calib.errors import UsageError

# Tensors with a factor for each frequency, as llama.cpp writes them: of Llama 3.1, and of LongRoPE.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def check_rope(found: ModelFiles, config: Any) -> None:
    """Raises UsageError if `found` is a GGUF file that scales RoPE, and `config`, as transformers read it, does not."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if found.gguf is None or rope.get("rope_type", "default") != "default":
        return
    if scaled := scaling(Path(found.path) / found.gguf):
        raise UsageError(
            f"'{found.asked}' scales RoPE ({scaled}), which transformers does not read from a GGUF file of this architecture; "
            "give the model's own folder or hub name"
        )


def scaling(path: Path) -> str | None:
    """Returns the entry of the GGUF file at `path` that scales RoPE, in words; None if there is none."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    for name, field in reader.fields.items():
        value = field.contents() if name.endswith((".rope.scaling.type", ".rope.scale_linear")) else None
        if value not in (None, "none", 1.0):
            return f"{name} is {value}"
    for tensor in reader.tensors:
        if tensor.name in FACTORS and not np.array_equal(tensor.data, np.ones_like(tensor.data)):
            return f"the tensor {tensor.name}"
    return None
