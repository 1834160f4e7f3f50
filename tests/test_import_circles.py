"""No import cycles between modules, nor between folders of the package. Imports under `if TYPE_CHECKING` do not count."""

import ast
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("runtime", "kernels")  # folders to which the package calib has links


def modules() -> dict[str, Path]:
    """Return the file of every module of the wheel by the module's dotted name."""
    found = {}
    for folder in ("calib", *LINKED):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[0] == "calib" and parts[1] in LINKED:
                continue  # the same file by way of the link
            name = ".".join(parts if parts[0] == "calib" else ("calib", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports, also inside functions, but not under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        yield from imported(node)


def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    found = {}
    for name, path in known.items():
        asked = (one if one in known else one.rpartition(".")[0] for one in imported(ast.parse(path.read_text())))
        found[name] = {one for one in asked if one in known and one != name}
    return found


def room(name: str) -> str:
    """Return the folder of a module below runtime, kernels or calib; a module directly in one of these is returned as is."""
    parts = name.split(".")
    depth = 3 if parts[1:2] and parts[1] in LINKED else 2
    return ".".join(parts[:depth]) if len(parts) > depth else name


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of one cycle, or an empty list."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.mark.full
@pytest.mark.parametrize("of", [str, room])
def test_no_import_comes_back_to_where_it_began(of: Callable[[str], str]):
    edges: dict[str, set[str]] = {}
    for name, others in graph().items():
        edges.setdefault(of(name), set()).update(of(other) for other in others if of(other) != of(name))
    assert len(edges) > 50
    assert not circle(edges)


def test_a_circle_is_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
