"""Every compression method by name. A new one is a file here, a YAML in configs/methods and a row in tests/support/cases.py
(docs/add_a_method.md)."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import nn

from calib.runtime.messages.printable import LENGTH, printable
from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.methods.corrections import CorrectedMethod, Corrections
from calib.runtime.methods.per_stream import as_written
from calib.runtime.methods.tuned import Tuned
from calib.runtime.rotation import KEEP_ROTATED, Rotation
from calib.runtime.stages.contract import Codec


def _methods() -> dict[str, type[Any]]:
    """Imports every module of this package and returns the classes that define a string `name` of their own, by that name."""
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
    "check_rope",
    "later_options",
    "method_class",
    "options_asked",
    "options_of",
    "packs_of",
]


def method_class(name: str) -> type[Any]:
    """Returns the class of method `name`; raises ValueError for an unknown name, with the closest known one."""
    if name not in list(METHODS):
        raise ValueError(f"unknown method {printable(name)} ({_hint(name, list(METHODS))})")
    return METHODS[name]


def options_of(name: str) -> list[str]:
    """Returns the names of the options that method `name` takes.

    These are its own fields, `corrections` unless the method has correction options of its own (`own_corrections`, as GEAR has),
    and `tuned` if it declares a `grid` for `calib tune`.
    """
    chosen = method_class(name)
    own = [option.name for option in fields(chosen)]
    corrected = [] if getattr(chosen, "own_corrections", False) else ["corrections"]
    return own + corrected + (["tuned"] if hasattr(chosen, "grid") else [])


def later_options(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of method `name` that are missing in `said`, at their defaults.

    A prefix file that was written before an option existed lacks it. With `tuned` among them there are no others to fill in.
    """
    return (
        {} if "tuned" in said else {own.name: own.default for own in fields(method_class(name)) if own.name not in said}
    )


def packs_of(chosen: type[Any]) -> tuple[type[Codec], ...]:
    """Returns the codec classes with which method class `chosen` may pack tokens; none if it declares none."""
    packs: tuple[type[Codec], ...] = getattr(chosen, "packs", ())
    return packs


def build(name: str, options: dict[str, Any]) -> Method:
    """Builds method `name` with `options`.

    `corrections` is a mapping of the options of `Corrections`. The option `low` is a mapping with the name of another method as
    `method`, and that method's options. `tuned` is a budget of `calib tune` in bits per value; the artifact has the options that
    were chosen for it, so none of the method's own may be given besides.

    Raises:
        ValueError: for an unknown method or option (the message has the closest known one), or a value that is out of range.
    """
    if "corrections" in options and getattr(method_class(name), "own_corrections", False):
        raise ValueError(
            f"method '{name}' has options of its own for corrections and takes no `corrections`; use its own"
        )
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
    """Builds method `name` from its own options, or a `Tuned` one if they have a budget `tuned`."""
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


def check_rope(name: str, model: nn.Module) -> None:
    """Raises ValueError if method `name` always encodes keys as they were before RoPE, and the model's cannot be undone.

    Check before making a plan: no fit measures what the plan would miss in the artifact of such a model.
    """
    if getattr(method_class(name), "before_rope", False):
        Rotation.of(model, KEEP_ROTATED)


def options_asked(method: Any) -> dict[str, Any]:
    """Returns all options of a built method, also those left at their default, in the form that `build` takes."""
    if hasattr(method, "tuned"):
        return {"tuned": method.tuned}
    if hasattr(method, "corrections"):
        own = {option: as_written(value) for option, value in vars(method.corrections).items()}
        return options_asked(method.method) | {"corrections": own}
    return {option: _nested(value) for option, value in vars(method).items()}


def _nested(value: Any) -> Any:
    """Returns an option's value in the form that `build` takes: a method (option `low`) and a `PerStream` become mappings."""
    return {"method": value.name} | options_asked(value) if hasattr(value, "plan") else as_written(value)


def _check_options(options: Mapping[str, Any], known: list[str], of: str) -> None:
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {printable(option)} of {of} ({_hint(option, known)})")


def _hint(word: object, known: list[str]) -> str:
    close = difflib.get_close_matches(word[:LENGTH], known, n=1) if isinstance(word, str) else []
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
