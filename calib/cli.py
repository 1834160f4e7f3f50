"""`calib COMMAND ...`: a standard-library dispatcher, so that `calib --help` answers before torch could be imported.

A command is one module in `calib/commands/` with `run(argv) -> int`; it is imported only when it is asked for. Every
failure ends here: one line on stderr, exit status 2 for usage and 1 for run time. `--debug` shows the traceback.
"""

import difflib
import importlib
import os
import sys

from calib import __version__
from calib.arguments import listing
from calib.errors import UsageError

COMMANDS = {
    "fit": "measure a model's keys and values and write one artifact",
    "pretrain": "train the small language model that ships as the default",
    "inspect": "show what an artifact holds",
    "methods": "list the compression methods and their options",
    "tune": "choose a method's options for a budget of bits, layer by layer",
    "generate": "run a prompt through a method beside the full cache",
    "eval": "measure what methods keep of a model's answers, and what they weigh",
    "bench": "measure how long methods take, what they hold, and the batch that still fits",
    "export": "write what other programs read: ONNX graphs, a checkpoint with fp8 scales for vLLM",
    "convert": "turn a checkpoint of another kind into one that transformers has code for",
}


def usage() -> str:
    hint = "calib COMMAND --help tells a command's options."
    return listing("calib [--version] [--debug] COMMAND [options]", "commands", COMMANDS, hint)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before torch starts its threads: with another process on the same cores, threads that spin while they wait make a
    # small model's forward pass ten times slower. An idle machine shows no difference.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"calib {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    try:
        if name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(COMMANDS)}"
            raise UsageError(f"unknown command '{name}' ({hint})")
        status: int = importlib.import_module(f"calib.commands.{name}").run(rest)
        return status
    except KeyboardInterrupt:
        print("calib: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        print(f"calib: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def one_line(error: Exception) -> str:
    """The message alone for our own errors; the type as well for those nobody foresaw."""
    text = " ".join(str(error).split())
    ours = type(error).__module__.startswith("calib.") or isinstance(error, (ValueError, OSError))
    return text if ours and text else f"{type(error).__name__}: {text} (--debug shows the traceback)"
