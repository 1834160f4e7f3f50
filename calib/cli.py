"""The dispatcher of `calib COMMAND ...`, from the standard library alone, so that `calib --help` need not import torch.

A command is one module in `calib/commands/` with `run(argv) -> int`, imported only when it runs. Every failure is reported
here: one line on stderr, with exit status 2 for usage errors (among them a file that the user named and that is refused) and 1
for run-time errors. `--debug` shows the traceback.
SIGTERM and SIGINT end a command with one line that names the command to resume with, and with status 143 or 130.
"""

import difflib
import importlib
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from calib import __version__
from calib.arguments import listing
from calib.errors import UsageError
from calib.interrupts import Interrupted, first_process, leave, listening, name_of, pending, resuming

COMMANDS = {
    "fit": "measure a model's keys and values and write one artifact",
    "merge": "make one artifact of what was measured on shards of a corpus",
    "inspect": "show what an artifact holds",
    "methods": "list the compression methods and their options",
    "tune": "choose a method's options for a budget of bits, layer by layer",
    "generate": "run a prompt through a method and through the full cache",
    "eval": "measure what methods keep of a model's answers, and the memory that they take",
    "bench": "measure how long methods take, what they hold, and the batch that still fits",
    "export": "write what other programs read: ONNX graphs, a checkpoint with fp8 scales for vLLM",
    "convert": "turn a checkpoint of another kind into one that transformers has code for",
}
LONGEST = 4000  # most characters of a command that a message repeats
LINE = 1000  # most characters of an error message
STDOUT = 1  # file descriptor


def usage() -> str:
    hint = "calib COMMAND --help lists a command's options."
    return listing("calib [--version] [--debug] COMMAND [options]", "commands", COMMANDS, hint)


def main(argv: list[str] | None = None) -> int:
    """Runs one command, of `argv` or of the process; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before torch starts its threads: with another process on the same cores, threads that spin while they wait make a
    # small model's forward pass ten times slower. An idle machine shows no difference.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    try:
        status = answer(arguments, debug)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `calib methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # output still buffered is discarded at exit
        return 128 + signal.SIGPIPE
    return status


def answer(arguments: Sequence[str], debug: bool) -> int:
    """Prints help or the version, or runs a command; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"calib {__version__}")
        return 0
    from calib.log_lines import shown  # help answers without it

    name, *words = arguments
    called = ("calib", name)
    try:
        with listening(), shown():
            return run(called, words, lambda: command(name), debug)
    except Interrupted as error:  # between `run` and the ends of both contexts
        return interrupted(error.number, called, words)


def command(name: str) -> Callable[[list[str]], int]:
    """Imports a command and returns its function; raises UsageError for an unknown name."""
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command '{name}' ({hint})")
    found: Callable[[list[str]], int] = importlib.import_module(f"calib.commands.{name}").run
    return found


def run(called: Sequence[str], words: list[str], load: Callable[[], Callable[[list[str]], int]], debug: bool) -> int:
    """Loads a command, runs it with `words` and returns its exit status; every failure is printed as one line.

    Args:
        called: the words that name the command, for messages.
        words: the command's arguments.
        load: imports and returns the command's function.
        debug: raise errors instead of printing them.
    """
    try:
        status = load()(words)
        if pending():  # a signal came, and some code caught its exception
            leave()
        return status
    except BaseException as error:
        # After a signal any error (a half-imported module, a library's own exit) counts as an interruption.
        if number := pending() or (error.number if isinstance(error, Interrupted) else None):
            return interrupted(number, called, words)
        if isinstance(error, KeyboardInterrupt):
            return interrupted(signal.SIGINT, called, words)
        if debug or not isinstance(error, Exception) or (isinstance(error, BrokenPipeError) and reader_gone()):
            raise
        print(f"calib: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def reader_gone() -> bool:
    """Returns whether the broken pipe is standard output, and not a library's connection."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def interrupted(number: int, called: Sequence[str], words: Sequence[str]) -> int:
    """Prints, in the first process, that a signal ended the command and how to resume; returns the exit status."""
    if first_process():
        print(f"calib: interrupted by {name_of(number)}; {going_on(called, words)}", file=sys.stderr)
    return 128 + number


def going_on(called: Sequence[str], words: Sequence[str]) -> str:
    """Returns the hint that names the command to resume with, or to start again with if nothing was kept."""
    more = [] if " ".join(resuming() or ()) in " ".join(words).replace("=", " ") else [*(resuming() or ())]
    again = shlex.join([*called, *(word for word in words if word != "--fresh"), *more])
    if len(again) > LONGEST or not again.isprintable():
        again = " ".join(["the same command", *(["and"] if more else []), *more])
    return f"{'start again' if resuming() is None else 'go on'} with: {again}"


def one_line(error: Exception) -> str:
    """Returns the message of an expected error (calib's own, ValueError, OSError); for others also its type."""
    text = bounded(" ".join(str(error).split()))
    ours = type(error).__module__.startswith("calib.") or isinstance(error, (ValueError, OSError))
    return text if ours and text else f"{type(error).__name__}: {text} (--debug shows the traceback)"


def bounded(text: str) -> str:
    """Returns `text` with at most LINE characters, all printable: a message may quote a hostile file's control characters."""
    if len(text) <= LINE and text.isprintable():
        return text
    from calib.runtime.messages.printable import shortened  # imports torch

    return shortened(text, LINE)
