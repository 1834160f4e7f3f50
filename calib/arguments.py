"""argparse for the small commands, with errors as our one line and exit status 2."""

import argparse
from typing import NoReturn

from calib.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError` instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; try `{self.prog} --help`")
