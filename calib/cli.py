"""`calib COMMAND ...`: a standard-library dispatcher, so that `calib --help` answers before torch could be imported.

A command is one module in `calib/commands/` with `run(argv) -> int`; it is imported only when it is asked for. Every
failure ends here: one line on stderr, exit status 2 for usage and 1 for run time; a file
that the user named and that is refused is usage. `--debug` shows the traceback.
SIGTERM and SIGINT end a command with one line that says how to go on, and with status 143 or 130.
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
LONGEST = 4000  # characters of a command that a message repeats
LINE = 1000  # characters of an error
STDOUT = 1  # its file descriptor


def usage() -> str:
    hint = "calib COMMAND --help lists a command's options."
    return listing("calib [--version] [--debug] COMMAND [options]", "commands", COMMANDS, hint)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before torch starts its threads: with another process on the same cores, threads that spin while they wait make a
    # small model's forward pass ten times slower. An idle machine shows no difference.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    try:
        status = answer(arguments, debug)
        sys.stdout.flush()
    except BrokenPipeError:  # `calib methods | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # what is still buffered goes nowhere at exit
        return 128 + signal.SIGPIPE
    return status


def answer(arguments: Sequence[str], debug: bool) -> int:
    """What was asked for: help, the version, or a command."""
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
    """The function of a command, imported now; raises UsageError for a name that is none."""
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command '{name}' ({hint})")
    found: Callable[[list[str]], int] = importlib.import_module(f"calib.commands.{name}").run
    return found


def run(called: Sequence[str], words: list[str], load: Callable[[], Callable[[list[str]], int]], debug: bool) -> int:
    """Loads what was `called` and runs it with `words`; whatever goes wrong is one line and a status."""
    try:
        status = load()(words)
        if pending():  # and somebody has swallowed it
            leave()
        return status
    except BaseException as error:
        # Whatever a signal has led to, a half-imported module or a library's own exit, it is the signal that ends us.
        if number := pending() or (error.number if isinstance(error, Interrupted) else None):
            return interrupted(number, called, words)
        if isinstance(error, KeyboardInterrupt):
            return interrupted(signal.SIGINT, called, words)
        if debug or not isinstance(error, Exception) or (isinstance(error, BrokenPipeError) and reader_gone()):
            raise
        print(f"calib: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def reader_gone() -> bool:
    """Whether the broken pipe is our own output, and not a library's connection."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def interrupted(number: int, called: Sequence[str], words: Sequence[str]) -> int:
    """Tells that the command was ended by a signal and how to go on; returns the exit status."""
    if first_process():
        print(f"calib: interrupted by {name_of(number)}; {going_on(called, words)}", file=sys.stderr)
    return 128 + number


def going_on(called: Sequence[str], words: Sequence[str]) -> str:
    """The command that goes on where this one was ended; one that keeps nothing starts again."""
    more = [] if " ".join(resuming() or ()) in " ".join(words).replace("=", " ") else [*(resuming() or ())]
    again = shlex.join([*called, *(word for word in words if word != "--fresh"), *more])
    if len(again) > LONGEST or not again.isprintable():
        again = " ".join(["the same command", *(["and"] if more else []), *more])
    return f"{'start again' if resuming() is None else 'go on'} with: {again}"


def one_line(error: Exception) -> str:
    """The message alone for our own errors; the type as well for those nobody foresaw."""
    text = bounded(" ".join(str(error).split()))
    ours = type(error).__module__.startswith("calib.") or isinstance(error, (ValueError, OSError))
    return text if ours and text else f"{type(error).__name__}: {text} (--debug shows the traceback)"


def bounded(text: str) -> str:
    """At most LINE characters and none that a terminal obeys: a message may quote what a hostile file holds."""
    if len(text) <= LINE and text.isprintable():
        return text
    from calib.runtime.messages.printable import shortened  # imports torch

    return shortened(text, LINE)
