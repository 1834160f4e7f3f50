"""Finds configuration files, in the working folder or in the package, and checks their keys before they are parsed."""

import argparse
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from calib.config_messages import unknown
from calib.errors import UsageError
from calib.runtime.messages.printable import printable
from calib.yaml_input import read_yaml_file


def known_keys(parser: argparse.ArgumentParser) -> list[str]:
    """Returns every dotted key that a configuration may hold, without jsonargparse's own `KEY.help` options."""
    names = {action.dest for action in parser._actions if not action.dest.endswith(".help")}
    return sorted(names - {"help", "print_config"})


def with_config_paths(words: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """Yields `words` with the names after `--config` and `-c` replaced by paths of files whose keys are among `keys`.

    Raises UsageError as `find_config` and `read_config` do.
    """
    is_value = False
    for word in words:
        option, equals, value = word.partition("=")
        if is_value:
            yield str(check_config(find_config(word), keys))
        elif option in ("--config", "-c") and equals:
            yield f"{option}={check_config(find_config(value), keys)}"
        else:
            yield word
        is_value = not is_value and word in ("--config", "-c")


def find_config(name: str, kind: str = "") -> Path:
    """Returns the path of the file `name`, or else of the packaged configuration of that name.

    `llama2.yaml` and `configs/llama2.yaml` both find the packaged file if neither exists locally; `methods/kivi.yaml` is
    found in its sub-folder. Raises UsageError if there is none; the message lists the packaged files in the sub-folder
    `kind` (of fits, the top folder).
    """
    if Path(name).exists():
        return Path(name)
    packaged = Path(str(resources.files("calib") / "configs"))
    parts = Path(name).parts
    for start in range(len(parts)):
        candidate = packaged.joinpath(*parts[start:])
        if not Path(name).is_absolute() and ".." not in parts and candidate.is_file():
            return candidate
    shipped = sorted(str(path.relative_to(packaged)) for path in packaged.joinpath(kind).glob("*.yaml"))
    raise UsageError(f"no configuration file '{name}', neither here nor in the package (it ships {', '.join(shipped)})")


def check_config(path: Path, keys: Sequence[str]) -> Path:
    """Returns `path` after checking the file as `read_config` does."""
    read_config(path, keys)
    return path


def read_config(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the content of a configuration file; raises UsageError unless it is a YAML mapping of known keys."""
    content = read_yaml_file(path)
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise UsageError(f"the configuration file '{path}' {found}; expected a mapping such as 'model: {{path: ...}}'")
    check_mapping(content, "", keys, path)
    return content


def check_mapping(content: dict[Any, Any], prefix: str, keys: Sequence[str], path: Path) -> None:
    """Raises UsageError for unknown keys, and for groups that are not mappings; values are checked later by the parser.

    A group may also be the name of a file, and below the top level a list of groups.
    """
    for name, value in content.items():
        key = f"{prefix}{name}"
        inside = any(known.startswith(f"{key}.") for known in keys)
        if inside and isinstance(value, dict):
            check_mapping(value, f"{key}.", keys, path)
        elif inside and not isinstance(value, str) and not (prefix and isinstance(value, list)):
            raise UsageError(f"'{key}' in '{path}' must be a mapping of options, got {printable(value)}")
        elif not inside and key not in keys:
            raise UsageError(unknown(key, keys))
