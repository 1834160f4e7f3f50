"""Descriptions and options of the compression methods, parsed from their source files without importing them.

Importing a method imports torch and transformers, which takes seconds; a list of methods should not.
"""

import ast
import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from calib.errors import UsageError

USES_FIT = ("statistics", "clip", "sparsity")  # a method with one of these options can use an artifact
PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Entry:
    """One compression method.

    Attributes:
        name: as `--method` takes it.
        story: the docstring of its class.
        options: defaults as Python source, by name.
        paper: the paper's number on arXiv; None if there is none.
        needs_fit: whether the method needs an artifact.
    """

    name: str
    story: str
    options: Mapping[str, str]
    paper: str | None
    needs_fit: bool

    @property
    def fit(self) -> str:
        """Whether an artifact of `calib fit` is needed, optional or unused, in words."""
        if self.needs_fit:
            return "needs a fit"
        return "a fit is optional" if set(USES_FIT) & set(self.options) else "no fit"

    @property
    def link(self) -> str:
        """The paper's address, or a page of the documentation; empty if there is neither."""
        if self.paper is not None:
            return f"https://arxiv.org/abs/{self.paper}"
        return "docs/klt.md" if self.name == "klt" else ""


class Source:
    """The classes of one file of `runtime/methods`."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The file's classes by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def paper(self) -> str | None:
        """The arXiv number of the first paper in the file's docstring; None if it names none."""
        found = PAPER.search(ast.get_docstring(self.tree) or "")
        return found[1] if found else None

    def story(self, name: str) -> str:
        """Returns the docstring of the class `name`."""
        return inspect.cleandoc(ast.get_docstring(self.classes[name]) or "")

    def said(self, name: str, attribute: str) -> str | None:
        """Returns the value that the class `name` assigns to an annotated attribute: a string as it is, others as source.

        None if the class itself does not assign it.
        """
        for part in self.classes[name].body:
            if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == attribute and part.value is not None:
                text = isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)
                return str(part.value.value) if text else ast.unparse(part.value)  # type: ignore[attr-defined]
        return None

    def options(self, name: str) -> dict[str, str]:
        """Returns the fields of the dataclass `name` with their defaults, those of its bases in the same file first."""
        found: dict[str, str] = {}
        node = self.classes[name]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                found |= self.options(base.id)
        for part in node.body:
            if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name) or part.value is None:
                continue
            if "ClassVar" not in ast.unparse(part.annotation):
                found[part.target.id] = _default(part.value)
        return found


def _default(written: ast.expr) -> str:
    """Returns a default as users write it: `PerStream(keys=..., values=...)` as a mapping, others as Python source."""
    if isinstance(written, ast.Call) and ast.unparse(written.func) == "PerStream":
        settings = {str(part.arg): ast.unparse(part.value) for part in written.keywords}
        return f"{{{', '.join(f'{name!r}: {value}' for name, value in settings.items())}}}"
    return ast.unparse(written)


def folder() -> Path:
    """Returns the folder of the methods' source files."""
    return Path(str(resources.files("calib"))) / "runtime" / "methods"


def catalogue() -> dict[str, Entry]:
    """Returns every method by name, in alphabetical order."""
    found = {}
    for path in folder().glob("*.py"):
        source = Source(path)
        for own in source.classes:
            name = source.said(own, "name")
            if name is not None:
                needs_fit = source.said(own, "needs_fit") == "True"
                entry = Entry(name, source.story(own), source.options(own), source.paper, needs_fit)
                found[name] = entry
    return dict(sorted(found.items()))


def corrections() -> str:
    """Returns the docstring of `Corrections`, which most methods take as an option."""
    return Source(folder() / "corrections.py").story("Corrections")


def chosen(name: str) -> Entry:
    """Returns the method `name`; raises UsageError, with the most similar name, if there is none."""
    known = catalogue()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise UsageError(f"unknown method {name!r} ({hint})")
    return known[name]
