"""argparse for the small commands, with errors as our one line and exit status 2."""

import argparse
from collections.abc import Mapping
from typing import NoReturn

from calib.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError` instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; try `{self.prog} --help`")


def listing(usage: str, heading: str, entries: Mapping[str, str], hint: str) -> str:
    """The help text of a command that only hands on to one of `entries`, each with what it does."""
    width = max(map(len, entries))
    lines = [f"  {name:<{width}}  {text}" for name, text in entries.items()]
    return "\n".join([f"usage: {usage}", "", f"{heading}:", *lines, "", hint])
