"""What is to be evaluated: one model, a list of methods, a list of tasks; checked when made, before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from calib.config_messages import unknown
from calib.errors import UsageError
from calib.evaluate.products import PRODUCTS
from calib.evaluate.tasks import Task, build_task
from calib.runtime.methods import Method, build

DTYPES = ("auto", "float32", "bfloat16", "float16")
MAPPINGS = ("corrections", "low")  # options that are mappings of options


@dataclass(frozen=True)
class MethodEntry:
    """One row of the table.

    Attributes:
        label: what the row is called; no two rows alike.
        method: a name from `calib methods`.
        options: the method's own. A value that is a mapping holds one value a column, by the column's title;
            those of `MAPPINGS`, mappings themselves, do where their values are mappings.
        group: the heading it stands under, "" for none.
        uses_artifact: whether the method is given the artifact; without one it works as published.
    """

    label: str
    method: str
    options: Mapping[str, Any]
    group: str
    uses_artifact: bool

    def options_for(self, title: str) -> dict[str, Any]:
        """The options for the column `title`; raises UsageError where a mapping has no value for it."""
        found = {}
        for name, value in self.options.items():
            by_column = isinstance(value, Mapping) and (name not in MAPPINGS or any(map(is_mapping, value.values())))
            if by_column and title not in value:
                raise UsageError(
                    f"methods: '{self.label}': {name} has no value for the column '{title}' "
                    f"(it has {', '.join(map(repr, value)) or 'none'})"
                )
            found[name] = value[title] if by_column else value
        return found

    def build(self, title: str) -> Method:
        """The method for the column `title`; raises UsageError for what it refuses."""
        try:
            return build(self.method, self.options_for(title))
        except (ValueError, TypeError) as error:
            raise UsageError(f"methods: '{self.label}': {error}") from error


@dataclass(frozen=True)
class Request:
    """Everything that is asked for.

    Attributes:
        name: the configuration's name, also of the folder of its results.
        methods: rows of the table, in order.
        tasks: each is one or more columns.
        model: a folder or a hub name.
        dtype: what the model runs in; `auto` is what its weights are stored in.
        device: a torch device.
        artifact: what `calib fit` wrote for this model, or None.
        seed: of the cases and of the methods that draw.
        batch_size: rows the model runs at once.
        limit: rows of each cell at most (cases, sequences), or None.
        threads: torch's threads, or None for its own choice.
        products: `model`, or `float32`: how linear layers of a 16-bit model multiply (`calib/evaluate/products.py`).
    """

    name: str
    methods: tuple[MethodEntry, ...]
    tasks: tuple[Task, ...]
    model: str = "artifacts/tiny-llama"
    dtype: str = "auto"
    device: str = "cpu"
    artifact: str | None = None
    seed: int = 20
    batch_size: int = 16
    limit: int | None = None
    threads: int | None = None
    products: str = "model"

    def __post_init__(self) -> None:
        for key, kind in (("model", str), ("device", str), ("artifact", str | None)):
            if not isinstance(getattr(self, key), kind) or getattr(self, key) == "":
                raise UsageError(f"invalid value {getattr(self, key)!r} for '{key}' (expected text)")
        if self.dtype not in DTYPES:
            raise UsageError(f"invalid value {self.dtype!r} for 'dtype' (expected one of {', '.join(DTYPES)})")
        if self.products not in PRODUCTS:
            raise UsageError(f"invalid value {self.products!r} for 'products' (expected one of {', '.join(PRODUCTS)})")
        for key, least in (("seed", 0), ("batch_size", 1), ("limit", 1), ("threads", 1)):
            value = getattr(self, key)
            if (value is not None or key in ("seed", "batch_size")) and (type(value) is not int or value < least):
                raise UsageError(f"invalid value {value!r} for '{key}' (expected a whole number, at least {least})")
        for what, names in (("methods", [entry.label for entry in self.methods]), ("columns", self.titles())):
            if not names:
                raise UsageError(f"no {what}: give at least one under `{'tasks' if what == 'columns' else what}`")
            twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
            if twice is not None:
                other = "name" if what == "methods" else "title"
                raise UsageError(f"two {what} are called '{twice}': give one of them another `{other}`")
        for entry in self.methods:
            if entry.uses_artifact and self.artifact is None:
                raise UsageError(f"methods: '{entry.label}' wants the artifact: give artifact=FILE of `calib fit`")
            for title in self.titles():
                entry.build(title)

    def titles(self) -> list[str]:
        """The titles of the columns, in order."""
        return [title for task in self.tasks for title in task.titles()]

    @staticmethod
    def known() -> list[str]:
        """What a configuration may hold."""
        return [field.name for field in fields(Request) if field.name != "name"]

    @staticmethod
    def of(content: Mapping[str, Any], name: str) -> "Request":
        """The request of a configuration's content; raises UsageError naming the first thing wrong with it."""
        for key in content:
            if key not in Request.known():
                raise UsageError(unknown(str(key), Request.known()))
        rest = {key: value for key, value in content.items() if key not in ("methods", "tasks")}
        return Request(name, method_entries(content.get("methods")), tasks(content.get("tasks")), **rest)


def method_entries(content: Any) -> tuple[MethodEntry, ...]:
    """The rows of `methods`; an item `{group: TEXT}` alone is the heading of those that follow."""
    entries, group = [], ""
    for place, item in enumerate(items(content, "methods", "{name: LABEL, method: NAME, ...}")):
        if set(item) == {"group"}:
            group = str(item["group"] or "")
            continue
        options = dict(item)
        method, label = options.pop("method", None), options.pop("name", None)
        if not isinstance(method, str):
            raise UsageError(f"methods[{place}] has no `method` (a name from `calib methods`): {item!r}")
        parts = [options, *(options.get(name) for name in MAPPINGS)]
        calibrated = any(is_mapping(part) and part.get("statistics") == "calibrated" for part in parts)
        uses = options.pop("artifact", calibrated)
        if not isinstance(uses, bool):
            raise UsageError(f"methods[{place}]: artifact must be true or false, got {uses!r}")
        entries.append(MethodEntry(str(label or method), method, options, group, uses))
    return tuple(entries)


def tasks(content: Any) -> tuple[Task, ...]:
    """The columns' tasks of `tasks`."""
    built = []
    for place, item in enumerate(items(content, "tasks", "{task: NAME, ...}")):
        options = dict(item)
        name = options.pop("task", None)
        if not isinstance(name, str):
            raise UsageError(f"tasks[{place}] has no `task` (such as retrieval): {item!r}")
        built.append(build_task(name, options))
    return tuple(built)


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value of the configuration has names inside."""
    return isinstance(value, Mapping)


def items(content: Any, key: str, example: str) -> Sequence[Mapping[str, Any]]:
    """`content` as a list of mappings."""
    if not isinstance(content, list) or not content:
        raise UsageError(f"'{key}' must be a list of entries such as `{example}`, got {content!r}")
    for place, item in enumerate(content):
        if not isinstance(item, dict) or not all(isinstance(name, str) for name in item):
            raise UsageError(f"{key}[{place}] must be an entry such as `{example}`, got {item!r}")
    return content
