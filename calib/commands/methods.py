"""`calib methods [NAME]`: the compression methods, each with its story and its options."""

import inspect
from collections.abc import Sequence
from dataclasses import fields

from calib.arguments import Parser
from calib.errors import UsageError


def run(argv: Sequence[str]) -> int:
    """Prints one line a method, or all about the one named in `argv`."""
    parser = Parser(prog="calib methods", description="List the compression methods and their options.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="tell everything about this one")
    asked = parser.parse_args(argv)

    from calib.runtime.methods import METHODS, method_class
    from calib.runtime.methods.corrections import Corrections

    if asked.name == "corrections":
        print(f"corrections: {inspect.getdoc(Corrections)}")
        return 0
    if asked.name:
        try:
            chosen = method_class(asked.name)
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(f"{asked.name}: {inspect.getdoc(chosen)}")
        return 0
    width = max(map(len, METHODS))
    for name, chosen in METHODS.items():
        options = ", ".join(f"{option.name}={option.default!r}" for option in fields(chosen)) or "no options"
        print(f"{name:<{width}}  {(inspect.getdoc(chosen) or '').splitlines()[0]}\n{'':<{width}}  {options}")
    print("Every method but GEAR's own takes corrections={...} besides: `calib methods corrections`.")
    return 0
