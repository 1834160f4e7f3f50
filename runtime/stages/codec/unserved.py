"""What has no kernel says so: once a stage, when a cache is made."""

import warnings
from collections.abc import Iterable

from calib.runtime.stages.codec.sized import Sized
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Codec

_told: set[type] = set()


def warn_unserved(codecs: Iterable[Codec], before_rope: bool) -> None:
    """A warning for each class of codec that no kernel reads, of keys that are stored `before_rope` or not, the first time that
    one is used in this process."""
    for codec in codecs:
        stage = codec.uncorrected
        own = type(stage.codec if isinstance(stage, Sized) else stage)
        if not codec.has_kernel or (before_rope and own is UniformQuant):
            kept = " of keys before RoPE" if codec.has_kernel else ""
            warn_once(
                own,
                f"no kernel reads {own.__name__}{kept}: attention decodes its tokens tile by tile in plain torch",
                4,
            )


def warn_once(stage: type, told: str, stacklevel: int) -> None:
    """What is `told` of a class of stages, the first time in this process; `stacklevel` is the user's line, from here."""
    if stage not in _told:
        _told.add(stage)
        warnings.warn(f"{told}, which is slow on a GPU", stacklevel=stacklevel)
