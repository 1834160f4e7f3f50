"""Warnings about codecs that no kernel reads, once for each class, when a cache is made."""

import warnings
from collections.abc import Iterable

from calib.runtime.stages.codec.sized import Sized
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Codec

_told: set[type] = set()


def warn_unserved(codecs: Iterable[Codec], before_rope: bool) -> None:
    """Warns about each class of codec that no kernel reads, the first time that it is used in this process; `before_rope` tells
    whether keys are stored before RoPE, for which fewer codecs have a kernel."""
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
    """Warns that `told`, once for a class of stages in this process; `stacklevel` leads from here to the user's line."""
    if stage not in _told:
        _told.add(stage)
        warnings.warn(f"{told}, which is slow on a GPU", stacklevel=stacklevel)
