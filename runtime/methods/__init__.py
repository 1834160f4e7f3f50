"""Every compression method by name. A new one is a file here, a YAML in configs/methods and a row in tests/support/cases.py
(docs/add_a_method.md)."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from calib.runtime.messages.printable import LENGTH, printable
from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.methods.corrections import CorrectedMethod, Corrections
from calib.runtime.methods.per_stream import as_written
from calib.runtime.methods.tuned import Tuned
from calib.runtime.stages.contract import Codec


def _methods() -> dict[str, type[Any]]:
    """The classes of the files beside this one that say their `name`, by it."""
    modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    own = [
        part
        for module in modules
        for part in vars(module).values()
        if isinstance(part, type) and part.__module__ == module.__name__ and isinstance(vars(part).get("name"), str)
    ]
    return {chosen.name: chosen for chosen in sorted(own, key=lambda chosen: chosen.name)}  # type: ignore[attr-defined]


METHODS: dict[str, type[Any]] = _methods()

__all__ = [
    "METHODS",
    "Geometry",
    "Method",
    "build",
    "later_options",
    "method_class",
    "options_asked",
    "options_of",
    "packs_of",
]


def method_class(name: str) -> type[Any]:
    """The method `name`; an unknown one is refused with the nearest known."""
    if name not in list(METHODS):
        raise ValueError(f"unknown method {printable(name)} ({_hint(name, list(METHODS))})")
    return METHODS[name]


def options_of(name: str) -> list[str]:
    """The options of method `name`; `corrections` are every method's but GEAR's own, which has them as its options, and
    `tuned` those' that a budget can choose for."""
    chosen = method_class(name)
    own = [option.name for option in fields(chosen)]
    corrected = [] if getattr(chosen, "own_corrections", False) else ["corrections"]
    return own + corrected + (["tuned"] if hasattr(chosen, "grid") else [])


def later_options(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The options of method `name` that a file of before them does not say, at the defaults that it was written with."""
    return (
        {} if "tuned" in said else {own.name: own.default for own in fields(method_class(name)) if own.name not in said}
    )


def packs_of(chosen: type[Any]) -> tuple[type[Codec], ...]:
    """The codecs by which a method may pack tokens."""
    packs: tuple[type[Codec], ...] = getattr(chosen, "packs", ())
    return packs


def build(name: str, options: dict[str, Any]) -> Method:
    """The method `name` with `options`; an unknown option is refused with the nearest known one.

    `corrections` is a mapping of the options of `Corrections`; the option `low` of a method is one of another method's name,
    its `method`, and options. With `tuned`, a budget of `calib tune`, there are no others: the artifact has them.
    """
    if "corrections" in options and getattr(method_class(name), "own_corrections", False):
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
        raise ValueError(f"corrections must be a mapping such as {{outliers: 0.02, rank: 4}}, got {printable(asked)}")
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
    tuned: Any = Tuned(name, method_class(name), own["tuned"])
    chosen: Method = tuned
    return chosen


def options_asked(method: Any) -> dict[str, Any]:
    """All options of a built method, those left at their default included, in the form that `build` takes."""
    if hasattr(method, "tuned"):
        return {"tuned": method.tuned}
    if hasattr(method, "corrections"):
        own = {option: as_written(value) for option, value in vars(method.corrections).items()}
        return options_asked(method.method) | {"corrections": own}
    return {option: _nested(value) for option, value in vars(method).items()}


def _nested(value: Any) -> Any:
    """A method among another's options as a mapping, and settings of keys and values; any other value as it is."""
    return {"method": value.name} | options_asked(value) if hasattr(value, "plan") else as_written(value)


def _check_options(options: Mapping[str, Any], known: list[str], of: str) -> None:
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {printable(option)} of {of} ({_hint(option, known)})")


def _hint(word: object, known: list[str]) -> str:
    close = difflib.get_close_matches(word[:LENGTH], known, n=1) if isinstance(word, str) else []
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
