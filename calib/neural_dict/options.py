"""The options of the dictionaries of a fit: `model.dictionary.*` of `calib fit`."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from calib.errors import UsageError
from calib.runtime.messages.printable import printable

Groups = Literal["measured", "layers", "paper-32"]

LEAST = {
    "atoms": 0,
    "keys_sparsity": 1,
    "values_sparsity": 1,
    "key_chunks": 1,
    "value_chunks": 1,
    "samples": 1,
    "heldout_samples": 1,
    "batch_size": 1,
    "epochs": 1,
    "patience": 1,
}


@dataclass(frozen=True)
class DictionaryOptions:
    """Which dictionaries are trained, and how.

    Args:
        atoms: atoms of a dictionary for each KV head; 0 trains none.
        keys_sparsity: pairs of each chunk of a key while its dictionary is trained.
        values_sparsity: pairs of each chunk of a value while its dictionary is trained.
        key_chunks: chunks that a key is cut into; divides head_dim.
        value_chunks: chunks that a value is cut into; divides head_dim.
        samples: vectors of a layer and stream on which dictionaries are trained and layers compared; all layers have the
            same number, as the divergence of layers depends on it.
        heldout_samples: vectors of a layer and stream on which dictionaries are validated.
        groups: which layers share a dictionary: `measured` by their divergence, `layers` (none do), or `paper-32`, the
            groups that the paper prints for its models of 32 layers.
        delta1: largest divergence of two layers of a measured group, in nats.
        delta2: largest sum of the divergences of adjacent layers of a measured group, in nats.
        batch_size: vectors of a training step.
        epochs: passes over a group's samples, at most.
        learning_rate: of Adam, at the beginning; it follows half a cosine to 0.
        diversity: add the penalty for atoms that resemble each other (eq. 10 and 11).
        reseed: replace atoms that no vector of an epoch used by residuals of the worst reconstructed samples.
        patience: epochs without a better validation loss after which a group stops.
    """

    atoms: int = 256
    keys_sparsity: int = 8
    values_sparsity: int = 4
    key_chunks: int = 1
    value_chunks: int = 2
    samples: int = 32768
    heldout_samples: int = 4096
    groups: Groups = "measured"
    delta1: float = 0.2
    delta2: float = 1.0
    batch_size: int = 512
    epochs: int = 10
    learning_rate: float = 1e-2
    diversity: bool = True
    reseed: bool = True
    patience: int = 5

    def __post_init__(self) -> None:
        """Raises UsageError for values out of range."""
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(f"model.dictionary.{name}={getattr(self, name)}: must be at least {least}")
        for name in ("delta1", "delta2", "learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"model.dictionary.{name}={value}: must be a number, 0 or more")
        if self.groups not in get_args(Groups):
            raise UsageError(f"model.dictionary.groups={printable(self.groups)}: one of {', '.join(get_args(Groups))}")
