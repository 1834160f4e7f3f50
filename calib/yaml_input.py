"""Reads YAML from files and from the command line, if it is plain data of a reasonable size.

By aliases of lists of aliases, a file of 20 lines can expand to ten thousand million values, too many for any later code to
walk. So the expanded size and depth are computed before any object is built.
"""

from pathlib import Path
from typing import Any

import yaml

from calib.errors import UsageError
from calib.runtime.messages.printable import printable, shortened

LARGEST = 1_000_000  # most bytes of a file, or characters of a text
NODES = 100_000  # most values; an alias counts as the values it expands to, a long text one more per PIECE characters
PIECE = 100
DEPTH = 32  # most levels of nested lists and mappings


class RefusedYamlError(yaml.YAMLError):
    """Well-formed YAML that is refused for its size, depth or a cycle; the message gives the reason."""


def read_yaml_file(path: Path, what: str = "configuration file") -> Any:
    """Returns the content of a YAML file.

    Raises UsageError, which names the file as `what`, if it cannot be read, is not UTF-8, not YAML, or refused.
    """
    name = shortened(str(path), 200)
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"the {what} '{name}' is larger than {LARGEST} bytes; give a smaller one")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the {what} '{name}': {reason}") from error
    try:
        return load_yaml(text)
    except RefusedYamlError as error:
        raise UsageError(f"'{name}' {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"'{name}' is not valid YAML{where(error)}") from error


def read_yaml_value(text: str, flag: str) -> Any:
    """Returns the value of a command-line option, parsed as YAML; raises UsageError, which names the flag."""
    try:
        return load_yaml(text)
    except RefusedYamlError as error:
        raise UsageError(f"the value of '{flag}' {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"the value of '{flag}' is not valid YAML: {printable(text)}") from error


def load_yaml(text: str) -> Any:
    """Returns the content of `text` as plain lists, mappings, strings, numbers and dates.

    Raises:
        RefusedYamlError: too large, nested too deeply, or a list or mapping that contains itself.
        yaml.YAMLError: not YAML, or with a tag such as `!!python/object`, for which nothing is built.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = composed(loader, text)
        return None if node is None else loader.construct_document(node)
    except ValueError as error:  # a date without such a month, a number of 5,000 digits
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def check_yaml(text: str) -> None:
    """Raises RefusedYamlError as `load_yaml` does; ignores other errors."""
    loader = yaml.SafeLoader(text)
    try:
        composed(loader, text)
    except RefusedYamlError:
        raise
    except yaml.YAMLError:
        return
    finally:
        loader.dispose()


def composed(loader: yaml.SafeLoader, text: str) -> yaml.Node | None:
    """Returns the node tree of a document after checking its size and depth; None if the document is empty."""
    if len(text) > LARGEST:
        raise RefusedYamlError(f"is longer than {LARGEST} characters; give less")
    try:
        node: yaml.Node | None = loader.get_single_node()
    except RecursionError as error:
        raise RefusedYamlError(f"is nested deeper than {DEPTH} levels") from error
    if node is not None:
        measure(node, {}, set())
    return node


def measure(node: yaml.Node, known: dict[int, tuple[int, int]], around: set[int]) -> tuple[int, int]:
    """Returns how many values a node expands to, and the levels below it; raises RefusedYamlError beyond the limits.

    Args:
        node: the root of the tree to be counted.
        known: results for nodes counted before, by identity.
        around: identities of the nodes that contain this one.
    """
    if id(node) in around:
        raise RefusedYamlError("holds a list or mapping that lies within itself")
    if id(node) not in known:
        size, height = 1, 0
        if isinstance(node, yaml.ScalarNode):
            size += len(node.value) // PIECE
        else:
            if len(around) >= DEPTH:
                raise RefusedYamlError(f"is nested deeper than {DEPTH} levels")
            around.add(id(node))
            parts = (
                node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
            )
            for part in parts:
                more, below = measure(part, known, around)
                size, height = size + more, max(height, below + 1)
                if size > NODES:
                    raise RefusedYamlError(f"expands to more than {NODES} values; give less, and fewer aliases")
                if height > DEPTH:
                    raise RefusedYamlError(f"is nested deeper than {DEPTH} levels")
            around.remove(id(node))
        known[id(node)] = size, height
    return known[id(node)]


def where(error: yaml.YAMLError) -> str:
    """Returns the line and the problem of a parser's error, such as `, line 3: the problem`."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{f', line {mark.line + 1}' if mark else ''}: {shortened(str(problem), 200)}"
