"""Every compression method by name; a new one is a file here, a YAML in configs/methods and a row in tests/cases.py."""

import difflib
from dataclasses import fields
from typing import Any

from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.methods.full import Full
from calib.runtime.methods.h2o import H2O
from calib.runtime.methods.kivi import Kivi
from calib.runtime.methods.mikv import MiKV
from calib.runtime.methods.oracle import Oracle
from calib.runtime.methods.rtn import Rtn
from calib.runtime.methods.streaming_llm import StreamingLLM
from calib.runtime.methods.zipcache import ZipCache

METHODS: dict[str, type[Any]] = {
    "full": Full,
    "h2o": H2O,
    "kivi": Kivi,
    "mikv": MiKV,
    "oracle": Oracle,
    "rtn": Rtn,
    "streaming_llm": StreamingLLM,
    "zipcache": ZipCache,
}

__all__ = ["METHODS", "Geometry", "Method", "build", "method_class"]


def method_class(name: str) -> type[Any]:
    """The method `name`; an unknown one is refused with the nearest known."""
    if name not in list(METHODS):
        raise ValueError(f"unknown method {name!r} ({_hint(str(name), list(METHODS))})")
    return METHODS[name]


def build(name: str, options: dict[str, Any]) -> Method:
    """The method `name` with `options`; an unknown option is refused with the nearest known one."""
    chosen = method_class(name)
    known = [option.name for option in fields(chosen)]
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {option!r} of method '{name}' ({_hint(option, known)})")
    method: Method = chosen(**options)
    return method


def _hint(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
