"""What to evaluate: one model, a list of methods and a list of tasks, checked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from calib.config_messages import unknown
from calib.errors import UsageError
from calib.evaluate.entries import Entry, items, read_entries
from calib.evaluate.products import PRODUCTS
from calib.evaluate.tasks import Task, build_task
from calib.runtime.messages.printable import printable

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Request:
    """What to evaluate. Raises UsageError for an invalid value.

    Attributes:
        name: the configuration's name, also that of the folder of its results.
        methods: rows of the table, in order.
        tasks: the tasks; each gives one or more columns.
        model: a folder or a hub name.
        dtype: the model's dtype; `auto` is the dtype in which its weights are stored.
        device: a torch device.
        artifact: the file that `calib fit` wrote for this model, or None.
        seed: seed of the cases and of methods that use random numbers.
        batch_size: number of rows that the model runs at once.
        limit: most rows of each cell (cases, sequences), or None.
        threads: number of torch threads, or None for torch's default.
        products: `model`, or `float32`: how linear layers of a 16-bit model multiply (`calib/evaluate/products.py`).
    """

    name: str
    methods: tuple[Entry, ...]
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
                raise UsageError(f"invalid value {printable(getattr(self, key))} for '{key}' (expected text)")
        if self.dtype not in DTYPES:
            raise UsageError(f"invalid value {printable(self.dtype)} for 'dtype' (expected one of {', '.join(DTYPES)})")
        if self.products not in PRODUCTS:
            raise UsageError(
                f"invalid value {printable(self.products)} for 'products' (expected one of {', '.join(PRODUCTS)})"
            )
        for key, least in (("seed", 0), ("batch_size", 1), ("limit", 1), ("threads", 1)):
            value = getattr(self, key)
            if (value is not None or key in ("seed", "batch_size")) and (type(value) is not int or value < least):
                raise UsageError(
                    f"invalid value {printable(value)} for '{key}' (expected a whole number, at least {least})"
                )
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
                entry.all_options(title)

    def titles(self) -> list[str]:
        """The titles of the columns, in order."""
        return [title for task in self.tasks for title in task.titles()]

    @staticmethod
    def known() -> list[str]:
        """Returns the keys that a configuration may have."""
        return [field.name for field in fields(Request) if field.name != "name"]

    @staticmethod
    def of(content: Mapping[str, Any], name: str) -> "Request":
        """Builds the request from a configuration's content; raises UsageError that names the first error in it."""
        for key in content:
            if key not in Request.known():
                raise UsageError(unknown(str(key), Request.known()))
        rest = {key: value for key, value in content.items() if key not in ("methods", "tasks")}
        return Request(name, read_entries(content.get("methods")), tasks(content.get("tasks")), **rest)


def tasks(content: Any) -> tuple[Task, ...]:
    """Builds the tasks from the `tasks` list of a configuration; raises UsageError."""
    built = []
    for position, item in enumerate(items(content, "tasks", "{task: NAME, ...}")):
        options = dict(item)
        name = options.pop("task", None)
        if not isinstance(name, str):
            raise UsageError(f"tasks[{position}] has no `task` (such as retrieval): {printable(item)}")
        built.append(build_task(name, options))
    return tuple(built)
