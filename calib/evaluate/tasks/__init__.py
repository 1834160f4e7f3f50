"""All tasks by name; a new task needs a file here and its name in `TASKS`."""

from dataclasses import fields
from typing import Any

from calib.config_messages import unknown
from calib.errors import UsageError
from calib.evaluate.tasks.agreement import Agreement
from calib.evaluate.tasks.contract import Column, Subject, Task, Written
from calib.evaluate.tasks.distortion import Distortion
from calib.evaluate.tasks.gsm8k import GSM8K
from calib.evaluate.tasks.humaneval import HumanEval
from calib.evaluate.tasks.lm_eval import LmEval
from calib.evaluate.tasks.longeval import LongEval
from calib.evaluate.tasks.needle import Needle
from calib.evaluate.tasks.passkey import Passkey
from calib.evaluate.tasks.perplexity import Perplexity
from calib.evaluate.tasks.retrieval import Retrieval

TASKS: dict[str, type[Any]] = {
    "retrieval": Retrieval,
    "needle": Needle,
    "passkey": Passkey,
    "perplexity": Perplexity,
    "agreement": Agreement,
    "distortion": Distortion,
    "lm_eval": LmEval,
    "longeval": LongEval,
    "gsm8k": GSM8K,
    "humaneval": HumanEval,
}

__all__ = ["TASKS", "Column", "Subject", "Task", "Written", "build_task"]


def build_task(name: str, options: dict[str, Any]) -> Task:
    """Builds the task `name` with `options`; raises UsageError that names the nearest known task or option."""
    if name not in TASKS:
        raise UsageError(unknown(f"tasks.{name}", [f"tasks.{known}" for known in TASKS]))
    known = [field.name for field in fields(TASKS[name])]
    for option in options:
        if option not in known:
            raise UsageError(unknown(f"tasks.{name}.{option}", [f"tasks.{name}.{field}" for field in known]))
    task: Task = TASKS[name](**options)
    return task
