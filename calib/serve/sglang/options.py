"""The fields of `--hicache-storage-backend-extra-config` that are ours."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.klt import BITS

TEXTS = ("artifact", "folder")


@dataclass(frozen=True)
class Options:
    """What the JSON says; its other fields are SGLang's. Budgets are checked by `Codec`.

    Attributes:
        artifact: path of an artifact of `calib fit`.
        folder: where pages are stored. It is made.
        bits: the budget in bits per value, keys and values together.
        positions: of the longest text, in tokens; None: `max_position_embeddings` of the artifact's model. Read only where
            SGLang does not tell the pages before (`hicache_storage_pass_prefix_keys`).
    """

    artifact: str
    folder: str
    bits: float = BITS
    positions: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Raises ValueError for a field that is missing or out of its range, and without SGLang's interface of whole pages."""
        for name in TEXTS:
            if not isinstance(given.get(name), str) or not given[name]:
                raise ValueError(f'the extra config has no {name}, expected a string; add "{name}": "..."')
        if given.get("interface_v1") not in (1, True):
            raise ValueError(
                f"interface_v1 is {given.get('interface_v1')!r}, expected 1: without it SGLang hands over bytes of no shape; add "
                '"interface_v1": 1'
            )
        if given.get("positions") is not None:
            check_whole("positions", given["positions"], 1, "a whole number, at least 1")
        own = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in own and value is not None})
