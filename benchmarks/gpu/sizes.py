"""The sizes of all measurements: those of the targets, and toy sizes for dry runs without a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Shape A and the other shapes; `tokens` are tokens in a cache, `prompt` the tokens of a prompt that is timed.

    `sets`: inputs used in rotation, so that a step never finds its data in the L2. `caches`: layers whose steps are timed together,
    because the layers of a model share work done once per step. `turns`: turns kept of a measurement, if its time allows them.
    """

    batch: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 32768
    prompt: int = 32768
    sets: int = 8
    caches: int = 16
    host_sets: int = 2  # sets of caches in host memory, together also far larger than the L2
    turns: int = 21
    fetched: int = 64

    # Matching pursuit and a training step of a dictionary.
    vectors: int = 65536
    pursuit_atoms: int = 4096
    sparsity: int = 8
    step_vectors: int = 512
    step_atoms: int = 8192

    # A model of the 8B shape with 4 of its 32 layers and an eighth of its vocabulary, so that a layer's share of a step is that
    # in the whole model.
    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 4
    vocabulary: int = 16032
    part: int = 8  # the whole model is so many times as large


REAL = Sizes()

TOY = Sizes(
    batch=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    tokens=256,
    prompt=160,
    sets=2,
    caches=4,
    host_sets=1,
    turns=5,
    fetched=8,
    vectors=32,
    pursuit_atoms=64,
    sparsity=2,
    step_vectors=16,
    step_atoms=48,
    hidden=64,
    intermediate=64,
    layers=2,
    vocabulary=64,
)
