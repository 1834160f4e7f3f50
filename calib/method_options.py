"""A method and its options on a command line: `--method kivi --bits 2`, or a YAML file that holds both."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from calib.config_files import find_config
from calib.errors import UsageError
from calib.yaml_input import read_yaml_file, read_yaml_value


@contextmanager
def as_usage() -> Iterator[None]:
    """Context that turns a ValueError about options into a UsageError: exit status 2."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_method(word: str) -> tuple[str, dict[str, Any]]:
    """Returns a method's name and options from `word`: a name, or a YAML file with `method` and options."""
    if not word.endswith((".yaml", ".yml")):
        return word, {}
    content = read_yaml_file(find_config(word, "methods"), "method's file")
    if not isinstance(content, dict) or not isinstance(content.get("method"), str):
        raise UsageError(f"'{word}' must be a mapping whose key `method` is a name")
    return content.pop("method"), content


def read_options(words: Sequence[str], known: set[str], method: str) -> dict[str, Any]:
    """Returns the options in `words`: `--bits 2 --clip=0.8` gives {"bits": 2, "clip": 0.8}.

    Raises UsageError for a flag that is not in `known`, or a flag without a value.
    """
    options, queue = {}, list(words)
    while queue:
        flag, equals, value = queue.pop(0).partition("=")
        option = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or option not in known:
            raise UsageError(f"unknown option '{flag}' (method '{method}' has {', '.join(sorted(known)) or 'none'})")
        if not equals:
            if not queue:
                raise UsageError(f"option '{flag}' needs a value")
            value = queue.pop(0)
        options[option] = read_yaml_value(value, flag)
    return options
