"""Thousands of damaged prefix files, each loaded and, where it is accepted, used for a few steps.

    python tests/hostile/campaign_prefixes.py --cases 3000 --seed 1 --json prefixes.json
    python tests/hostile/campaign_prefixes.py --seed 1 --only 1234     # repeats one case, with its traceback

A file must be refused by a `PrefixError` of one line, or be accepted and give finite logits; within a time limit, and without
memory beyond a small multiple of the file.
"""

import functools
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cases import calibrated_artifact
from damaged_prefixes import damaged
from hostile_cases import Done, command, counted, limited
from saved_prefixes import BASES, Base
from transformers import PreTrainedModel

from calib.runtime import Artifact, compress
from calib.runtime.prefix.prefix import PrefixError

STEPS = 3


def outcome(base: Base, path: Path, size: int) -> tuple[str, str]:
    """Load the file at `path` and use it; return one of OUTCOMES and the message. `size`: bytes of the file."""
    return limited(partial(_used, base, path), size, PrefixError, str(path))


@functools.cache
def artifact_of(model: PreTrainedModel) -> Artifact:
    """The artifact of a model, which all cases share."""
    return calibrated_artifact(model)


def _used(base: Base, path: Path) -> tuple[str, str]:
    artifact = artifact_of(base.model) if base.case.artifact else None
    asked = {"method": base.case.method, "artifact": artifact, **base.case.options}
    with compress(base.model, prefix=path, **asked) as cache, torch.no_grad():
        rows = len(cache.sequences.lengths)
        tokens = torch.full((rows, 1), 5)
        if cache.input_ids is not None:
            tokens = cache.input_ids[:, -1:]
        for _ in range(STEPS):
            logits = base.model(input_ids=tokens, past_key_values=cache).logits[:, -1:]
            if not logits.isfinite().all():
                return "nan", "logits that are not finite"
            tokens = logits.argmax(-1)
        cache.memory()
        cache.reorder_cache(torch.arange(rows).flip(0))
        longer = base.model(input_ids=tokens.expand(-1, 12), past_key_values=cache).logits
        if not longer.isfinite().all():
            return "nan", "logits that are not finite, of several tokens"
    return "accepted", ""


def bases(folder: Path, chosen: list[tuple[str, str, float]]) -> list[Base]:
    """Save the chosen caches, and check that the undamaged files are accepted."""
    found = [Base.saved(*one, folder) for one in chosen]
    for base in found:
        path = folder / "whole.safetensors"
        path.write_bytes(base.data)
        told = outcome(base, path, len(base.data))
        assert told[0] == "accepted", f"{base.case}: {told}"
    return found


def campaign(
    cases: range,
    seed: int,
    tell: Callable[[int, Done], None] | None = None,
    *,
    chosen: list[tuple[str, str, float]] = BASES,
) -> dict[str, Any]:
    """Run the cases; return the counts of `hostile_cases.counted`."""
    with tempfile.TemporaryDirectory() as folder:
        whole, path = bases(Path(folder), chosen), Path(folder) / "damaged.safetensors"

        def one(number: int, draw: Random) -> Done:
            base = whole[number % len(whole)]
            data, done = damaged(base, draw)
            path.write_bytes(data)
            return Done(f"{base.case} {base.model.config.model_type}", done, *outcome(base, path, len(data)))

        return counted(cases, seed, one, tell)


if __name__ == "__main__":
    sys.exit(command(__doc__, 3000, campaign))
