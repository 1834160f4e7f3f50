"""A task of lm-eval by its name: its requests and its metrics of given answers, reproducible at every call."""

import hashlib
import io
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from calib.capture.language_model import without_waiting_for_the_hub
from calib.errors import UsageError
from calib.evaluate.lm_eval.metrics import spelled
from calib.evaluate.lm_eval.rows_lm import RowsLM
from calib.runtime.messages.printable import printable

DRAWS = 1000  # resamples of lm-eval's bootstrap, for the few metrics whose standard error has no formula
WHERE = ("dataset_path", "dataset_name", "dataset_kwargs", "metadata")  # not hashed; the documents themselves are
Folders = str | Path | Sequence[str | Path] | None


class NamedTask:
    """A task, or a group with aggregate metrics, with its data.

    Args:
        manager: lm-eval's task manager.
        name: name of the task or group.
        few_shot: examples in a prompt; None: the task's own number. As in lm-eval, tasks whose own number is 0 get no examples.
        cases: most documents (of each task of a group); None for all.
        seed: seed of everything that the task draws.
        chat: the model interface whose chat template renders the prompts; None: prompts are used unchanged.

    Attributes:
        settings: plain JSON of everything that requests and metrics depend on.
        metrics: names of its figures, in order.

    Raises:
        UsageError: if the name is unknown, data are unavailable, a task runs generated code or needs more than text, or a group
            has no aggregate metric.
    """

    def __init__(
        self,
        manager: TaskManager,
        name: str,
        few_shot: int | None,
        cases: int | None,
        seed: int,
        chat: RowsLM | None = None,
    ) -> None:
        self.name, self.cases, self.seed, self.chat = name, cases, seed, chat
        check_name(manager, name)
        with self._state():  # all of it, since even loading a task draws random numbers
            self.loaded = load(manager, name)
            self.tasks = list(self.loaded["tasks"].values())
            self._check()
            for task in self.tasks:
                own = task.get_config("num_fewshot")
                if own != 0 and (few_shot is not None or own is None):
                    task.set_config(key="num_fewshot", value=few_shot or 0)
            requests = [request for some in self.requests().values() for request in some]
        shots = sorted({int(task.get_config("num_fewshot") or 0) for task in self.tasks})
        self.settings: dict[str, Any] = {
            "name": name,
            "lm_eval": version("lm-eval"),
            "version": str(self._figures_of().VERSION if len(self.tasks) == 1 else self._figures_of().version),
            "few_shot": shots[0] if len(shots) == 1 else shots,
            "cases": len({(request.task_name, request.doc_id) for request in requests}),
            "sha256": self._hash(requests),
        }
        self.metrics = list(dict.fromkeys(spelled(metric) for task in self.tasks for metric in task.aggregation()))

    def requests(self) -> dict[str, list[Instance]]:
        """Returns all requests by kind, in the order of lm-eval's `evaluate`; a repeated request occurs several times."""
        found: dict[str, list[Instance]] = {}
        chat: dict[str, Any] = {}
        if self.chat is not None:
            name, written = self.chat.tokenizer_name, self.chat.apply_chat_template
            chat = {"apply_chat_template": True, "chat_template": written, "tokenizer_name": name}
        with self._state():
            for task in self.tasks:
                task.build_all_requests(limit=self.cases, rank=0, world_size=1, **chat)
                for request in task.instances:
                    found.setdefault(request.request_type, []).extend([request] * (request.repeats or 1))
        return found

    def results(self, lm: RowsLM) -> dict[str, Any]:
        """Returns lm-eval's metrics of the answers of `lm`: `acc,none`, `acc_stderr,none`, ..."""
        with self._state():
            given = {"limit": self.cases, "bootstrap_iters": DRAWS, "log_samples": False}
            found = evaluate(lm, self.loaded, apply_chat_template=self.chat is not None, **given)["results"]
            return dict(found[self.tasks[0].task_name if len(self.tasks) == 1 else self.name])

    def _figures_of(self) -> Any:
        """Returns the only task, or the group that has the metrics."""
        return self.tasks[0] if len(self.tasks) == 1 else self.loaded["groups"].get(self.name)

    def _check(self) -> None:
        group = self._figures_of()
        if len(self.tasks) != 1 and not getattr(group, "has_aggregation", False):
            names = [task.task_name for task in self.tasks]
            listed = f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
            raise UsageError(
                f"tasks.lm_eval: '{self.name}' is a group of {len(names)} tasks without a common metric; give its tasks: {listed}"
            )
        for task in self.tasks:
            for flag, what in (
                ("UNSAFE_CODE", "runs what the model wrote"),
                ("MULTIMODAL", "asks about images or sounds"),
            ):
                if getattr(task, flag, False):
                    raise UsageError(f"tasks.lm_eval: '{task.task_name}' {what}, which is not done here; leave it out")

    def _hash(self, requests: Sequence[Instance]) -> str:
        """Returns the SHA-256 of the requests, the documents with their targets, and the tasks' configurations."""
        configs = [{key: value for key, value in task.dump_config().items() if key not in WHERE} for task in self.tasks]
        asked = [[request.request_type, request.args, request.doc] for request in requests]
        text = json.dumps([configs, asked], sort_keys=True, default=plain_name)
        return hashlib.sha256(text.encode()).hexdigest()

    @contextmanager
    def _state(self) -> Iterator[None]:
        """Context manager: seed all random generators with `seed` and silence output; afterwards restore the process's state.

        lm-eval's tasks draw from the global generators as well as from their own, show progress bars and print.
        """
        states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is meant
        processes = os.environ.get("DISABLE_MULTIPROC")
        silence = io.StringIO()
        try:
            with torch.random.fork_rng(devices=[]), redirect_stdout(silence), redirect_stderr(silence):
                random.seed(self.seed)
                np.random.seed(self.seed % 2**32)  # noqa: NPY002
                torch.random.default_generator.manual_seed(self.seed)
                os.environ["DISABLE_MULTIPROC"] = "1"  # no bootstrap in processes that would copy the model
                for task in getattr(self, "tasks", ()):
                    task.set_fewshot_seed(seed=self.seed)
                yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            os.environ.pop("DISABLE_MULTIPROC")
            if processes is not None:
                os.environ["DISABLE_MULTIPROC"] = processes


def known_tasks(include_path: Folders, names: Sequence[str]) -> TaskManager:
    """Returns a manager of lm-eval's tasks and those of the YAML files in `include_path`; raises UsageError if a folder is missing.

    lm-eval reads thousands of files to index its own tasks, so they are skipped if the folders have all of `names`.
    """
    folders = [include_path] if isinstance(include_path, str | Path) else list(include_path or ())
    missing = next((folder for folder in folders if not Path(folder).is_dir()), None)
    if missing is not None:
        raise UsageError(f"tasks.lm_eval.include_path: no folder '{missing}', expected one with YAML files of tasks")
    if folders:
        local = TaskManager(include_path=folders, include_defaults=False)
        if all(name in local.all_subtasks for name in names):
            return local
    return TaskManager(include_path=folders or None)


def check_name(manager: TaskManager, name: str) -> None:
    """Raises UsageError for a name that lm-eval does not know, with the nearest known names."""
    if name in manager.all_tasks:
        return
    near = get_close_matches(name, manager.all_tasks, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lm-eval ls tasks` lists them"
    raise UsageError(f"tasks.lm_eval: lm-eval {version('lm-eval')} has no task '{name}' ({hint})")


def load(manager: TaskManager, name: str) -> Any:
    """Loads the tasks and groups of a name with their data; raises UsageError if that fails."""
    try:
        with without_waiting_for_the_hub():
            return manager.load([name])
    except Exception as error:  # the hub's failures, and those of a task's own code, come in many types
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
        if isinstance(error, OSError):  # what the hub, its client and missing files raise
            data = (manager.task_index[name].cfg or {}).get("dataset_path")
            raise UsageError(
                f"tasks.lm_eval: '{name}' needs {f'the data set {printable(data)}' if data else 'data sets'} that cannot be had "
                f"({reason}); without network give HF_HOME with a copy, or local tasks (include_path)"
            ) from error
        raise UsageError(f"tasks.lm_eval: lm-eval cannot load '{name}' ({reason})") from error


def plain_name(value: Any) -> str:
    """Returns a name for an object that JSON cannot represent: the function's or the type's, which is the same in every process."""
    return str(getattr(value, "__name__", type(value).__name__))
