"""What `calib eval --plan` and `calib bench --plan` do: print the plan, and write it to `--plan_json` if that was given."""

import json
from typing import Any

from calib.errors import RunError
from calib.plan.run_text import run_text
from calib.runtime.files.atomic_file import write_atomically


def tell_runs(plans: dict[str, dict[str, Any]], file: str | None) -> int:
    """Prints the plans by model name (a single plan has the name ""), and writes them to `file`; raises RunError if that fails."""
    for name, plan in plans.items():
        print(*([f"model {name}:"] if name else []), run_text(plan), *([""] if len(plans) > 1 else []), sep="\n")
    write_plan(plans.get("", plans), file)
    return 0


def write_plan(content: dict[str, Any], file: str | None) -> None:
    """Writes the plan as JSON to the file of `--plan_json`, if given; raises RunError if it cannot be written."""
    if file is None:
        return
    try:
        write_atomically(file, json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        raise RunError(f"plan_json={file}: cannot be written ({error.strerror})") from error
