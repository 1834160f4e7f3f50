"""Reads a request from YAML files and command-line arguments.

    calib eval --config eval/importance.yaml --limit 20 --tasks.retrieval.cases 50

Several files are merged from left to right, key by key; command-line options override them. Option values are read as YAML.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

from calib.config_files import find_config, read_config
from calib.config_messages import unknown
from calib.errors import UsageError
from calib.evaluate.models import requests
from calib.evaluate.request import Request
from calib.evaluate.tasks import TASKS
from calib.yaml_input import read_yaml_value


def read_request(files: Sequence[str], words: Sequence[str]) -> Request:
    """Returns the first request (see `read_requests`); raises UsageError of one line for any error."""
    return next(iter(read_requests(files, words).values()))


def read_requests(files: Sequence[str], words: Sequence[str]) -> dict[str, Request]:
    """Returns the requests by the model's name, or one under "" for a configuration of one model.

    `files` are configurations, `words` command-line options. Raises UsageError of one line for any error.
    """
    content: dict[str, Any] = {}
    paths = [find_config(name, "eval") for name in files]
    for path in paths:
        content |= read_config(path, [*Request.known(), "models"])
    for key, value in overrides(words, known_keys()):
        content = overridden(content, key, value)
    return requests(content, paths[-1].stem if paths else "eval")


def overrides(words: Sequence[str], known: Sequence[str], lists: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Parses `--limit 20 --seed=1` to [("limit", 20), ("seed", 1)]; an option in `lists` may have several values
    (`--contexts 256 1024`), which become a list."""
    found, queue = [], list(words)
    while queue:
        flag, equals, value = queue.pop(0).partition("=")
        if not flag.startswith("--"):
            raise UsageError(f"unexpected argument '{flag}'")
        key = flag.removeprefix("--").replace("-", "_")
        if key not in known:
            raise UsageError(unknown(key, known))
        values = [value] if equals else []
        while queue and not queue[0].startswith("--") and (not values or (key in lists and not equals)):
            values.append(queue.pop(0))
        if not values:
            raise UsageError(f"option '{flag}' needs a value")
        read = [read_yaml_value(value, flag) for value in values]
        alone = key not in lists or (len(read) == 1 and isinstance(read[0], list))
        found.append((key, read[0] if alone else read))
    return found


def known_keys() -> list[str]:
    """Returns all keys that may be overridden: those of the request, and `tasks.TASK.OPTION`."""
    plain = [key for key in [*Request.known(), "models"] if key not in ("methods", "tasks")]
    dotted = [f"tasks.{name}.{field.name}" for name, task in TASKS.items() for field in fields(task)]
    return plain + dotted


def overridden(content: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns a copy of the content with `key` replaced; `tasks.TASK.OPTION` is replaced in every task of that name."""
    result = deepcopy(dict(content))
    if "." not in key:
        return result | {key: value}
    _, name, option = key.split(".")
    tasks = result.get("tasks")
    matching = [item for item in tasks or () if isinstance(item, dict) and item.get("task") == name]
    if not matching:
        raise UsageError(f"'{key}' is given and the configuration has no task '{name}'")
    for item in matching:
        item[option] = value
    return result
