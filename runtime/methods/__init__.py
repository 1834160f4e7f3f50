"""Every compression method by name; a new one is a file here, a YAML in configs/methods and a row in tests/cases.py."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.methods.corrections import CorrectedMethod, Corrections
from calib.runtime.methods.csr import Csr
from calib.runtime.methods.full import Full
from calib.runtime.methods.gear import Gear, GearL, GroupWise, OutlierReduced, Uniform
from calib.runtime.methods.h2o import H2O
from calib.runtime.methods.infllm import InfLLM
from calib.runtime.methods.kivi import Kivi
from calib.runtime.methods.klt import Klt
from calib.runtime.methods.mikv import MiKV
from calib.runtime.methods.offload import Offload
from calib.runtime.methods.oracle import Oracle
from calib.runtime.methods.rtn import Rtn
from calib.runtime.methods.specache import SpeCache
from calib.runtime.methods.streaming_llm import StreamingLLM
from calib.runtime.methods.zipcache import ZipCache
from calib.runtime.tuned import Tuned

METHODS: dict[str, type[Any]] = {
    "csr": Csr,
    "full": Full,
    "gear": Gear,
    "gear_l": GearL,
    "group_wise": GroupWise,
    "h2o": H2O,
    "infllm": InfLLM,
    "kivi": Kivi,
    "klt": Klt,
    "mikv": MiKV,
    "offload": Offload,
    "oracle": Oracle,
    "outlier_reduced": OutlierReduced,
    "rtn": Rtn,
    "specache": SpeCache,
    "streaming_llm": StreamingLLM,
    "uniform": Uniform,
    "zipcache": ZipCache,
}

__all__ = ["METHODS", "Geometry", "Method", "build", "method_class", "options_asked", "options_of"]


def method_class(name: str) -> type[Any]:
    """The method `name`; an unknown one is refused with the nearest known."""
    if name not in list(METHODS):
        raise ValueError(f"unknown method {name!r} ({_hint(str(name), list(METHODS))})")
    return METHODS[name]


def options_of(name: str) -> list[str]:
    """The options of method `name`; `corrections` are every method's but GEAR's own, which has them as its options, and
    `tuned` those' that a budget can choose for."""
    chosen = method_class(name)
    own = [option.name for option in fields(chosen)]
    return own + ([] if issubclass(chosen, Gear) else ["corrections"]) + (["tuned"] if hasattr(chosen, "grid") else [])


def build(name: str, options: dict[str, Any]) -> Method:
    """The method `name` with `options`; an unknown option is refused with the nearest known one.

    `corrections` is a mapping of the options of `Corrections`; the option `low` of a method is one of another method's name,
    its `method`, and options. With `tuned`, a budget of `calib tune`, there are no others: the artifact has them.
    """
    if "corrections" in options and issubclass(method_class(name), Gear):
        raise ValueError(f"method '{name}' has options of its own for what `corrections` asks for; give it these")
    own = {option: value for option, value in options.items() if option != "corrections"}
    _check_options(own, options_of(name), f"method '{name}'")
    if isinstance(own.get("low"), Mapping) and "method" in own["low"]:
        own["low"] = build(own["low"]["method"], {key: value for key, value in own["low"].items() if key != "method"})
    method: Method = _own_method(name, own)
    if options.get("corrections") is None:
        return method
    asked = options["corrections"]
    if not isinstance(asked, Mapping):
        raise ValueError(f"corrections must be a mapping such as {{outliers: 0.02, rank: 4}}, got {asked!r}")
    _check_options(asked, [option.name for option in fields(Corrections)], "corrections")
    return CorrectedMethod(method, Corrections(**asked))


def _own_method(name: str, own: dict[str, Any]) -> Method:
    """The method by its own options, or as it was tuned."""
    if own.get("tuned") is None:
        built: Method = method_class(name)(**{option: value for option, value in own.items() if option != "tuned"})
        return built
    others = [option for option in own if option != "tuned"]
    if others:
        raise ValueError(
            f"tuned={own['tuned']} stands for all options of '{name}', got {', '.join(others)} besides; leave "
            f"{'it' if len(others) == 1 else 'them'} out, or give {'it' if len(others) == 1 else 'them'} to `calib tune`"
        )
    return Tuned(name, method_class(name), own["tuned"])


def options_asked(method: Any) -> dict[str, Any]:
    """All options of a built method, those left at their default included, in the form that `build` takes."""
    if isinstance(method, Tuned):
        return {"tuned": method.tuned}
    if isinstance(method, CorrectedMethod):
        return options_asked(method.method) | {"corrections": vars(method.corrections)}
    return {option: _nested(value) for option, value in vars(method).items()}


def _nested(value: Any) -> Any:
    """A method among another's options as a mapping; any other value as it is."""
    own = value.method if isinstance(value, CorrectedMethod) else value
    name = (
        own.name if isinstance(own, Tuned) else next((n for n, chosen in METHODS.items() if type(own) is chosen), None)
    )
    return value if name is None else {"method": name} | options_asked(value)


def _check_options(options: Mapping[str, Any], known: list[str], of: str) -> None:
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {option!r} of {of} ({_hint(str(option), known)})")


def _hint(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
