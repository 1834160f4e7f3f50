"""argparse for commands without Lightning: errors become a `UsageError`, one line and exit status 2."""

import argparse
from collections.abc import Mapping
from typing import NoReturn

from calib.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; try `{self.prog} --help`")


def listing(usage: str, heading: str, entries: Mapping[str, str], hint: str) -> str:
    """Returns the help text of a command that dispatches to one of `entries` (name: description)."""
    width = max(map(len, entries))
    lines = [f"  {name:<{width}}  {text}" for name, text in entries.items()]
    return "\n".join([f"usage: {usage}", "", f"{heading}:", *lines, "", hint])


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the flags `--plan` and `--plan_json`."""
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print the predicted memory, disk space and time; load no weights, run nothing",
    )
    parser.add_argument("--plan_json", metavar="FILE", help="with --plan: a file for the plan as JSON as well")


def check_plan(asked: argparse.Namespace, *others: str) -> None:
    """Raises UsageError for `--plan_json` without `--plan`, and for `--plan` with any of the flags `others`."""
    if asked.plan_json is not None and not asked.plan:
        raise UsageError(
            f"'--plan_json' got {asked.plan_json}, but without '--plan' there is no plan to write; add '--plan'"
        )
    for flag in others:
        if asked.plan and getattr(asked, flag.removeprefix("--").replace("-", "_")):
            raise UsageError(f"'--plan' measures nothing, so '{flag}' would have no effect; leave one of them out")
