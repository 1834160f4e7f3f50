"""Training tasks of the dictionaries: the sampled vectors of each group's layers, cut into chunks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calib.capture.shape import Shape
from calib.errors import UsageError
from calib.layer_groups.grouping import check_paper
from calib.neural_dict.options import DictionaryOptions
from calib.neural_dict.training import Task
from calib.runtime.artifact.tensor_registry import STREAMS


def check_dictionaries(options: DictionaryOptions, shape: Shape, tokens: int) -> None:
    """Raises UsageError if the options do not fit the model's sizes, or a corpus of `tokens` tokens gives too few vectors."""
    if options.groups == "paper-32":
        check_paper(shape.layers)
    for stream in STREAMS:
        parts = chunks(stream, options)
        if shape.head_dim % parts:
            name = f"model.dictionary.{stream.removesuffix('s')}_chunks"
            raise UsageError(f"{name}={parts}: must divide the model's head_dim {shape.head_dim}")
        channels = shape.head_dim // parts
        if sparsity(stream, options) > channels:
            raise UsageError(
                f"model.dictionary.{stream}_sparsity={sparsity(stream, options)}: must be at most {channels}, the "
                "channels of an atom"
            )
    vectors = min(options.samples, tokens * shape.kv_heads)
    if options.atoms * shape.kv_heads > vectors:
        raise UsageError(
            f"model.dictionary.atoms={options.atoms} for each of {shape.kv_heads} KV heads: a dictionary of "
            f"{options.atoms * shape.kv_heads} atoms needs as many vectors and has {vectors}, of "
            f"model.dictionary.samples={options.samples} and {tokens} tokens; give more of them, or fewer atoms (0 for none)"
        )


def sparsity(stream: str, options: DictionaryOptions) -> int:
    """Returns the (atom, coefficient) pairs of each chunk while the stream's dictionaries are trained."""
    return options.keys_sparsity if stream == "keys" else options.values_sparsity


def chunks(stream: str, options: DictionaryOptions) -> int:
    """Returns into how many equal chunks a vector of the stream is cut."""
    return options.key_chunks if stream == "keys" else options.value_chunks


def group_tasks(
    stream: str,
    groups: Sequence[Sequence[int]],
    samples: Mapping[int, Tensor],
    heldout: Mapping[int, Tensor],
    options: DictionaryOptions,
    kv_heads: int,
) -> list[Task]:
    """Returns one training task for each group, named `keys.0` and so on.

    Args:
        stream: `keys` or `values`.
        groups: the layers of each group.
        samples: sampled vectors by layer, float32 `[vectors, head_dim]`.
        heldout: the same from held-out text, for validation.
        options: the fit's dictionary options.
        kv_heads: KV heads of the model; a dictionary has `options.atoms * kv_heads` atoms.
    """
    parts = chunks(stream, options)

    def vectors(of: Mapping[int, Tensor], layers: Sequence[int]) -> Tensor:
        whole = torch.cat([of[layer] for layer in layers])
        return whole.reshape(-1, whole.shape[-1] // parts)

    return [
        Task(
            f"{stream}.{number}",
            vectors(samples, layers),
            vectors(heldout, layers),
            options.atoms * kv_heads,
            sparsity(stream, options),
        )
        for number, layers in enumerate(groups)
    ]
