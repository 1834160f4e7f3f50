"""Commands that running text quotes, and commands of blocks: commands, modules, scripts, options, extras and make targets exist."""

import contextlib
import io
import re
import subprocess
import tomllib
from functools import cache
from importlib.util import find_spec

from documented import ROOT, Command, block_commands, documents, inline_commands, text_of
from documented_runs import kind_of, run_python

from calib import cli
from calib.bench.request import BenchRequest
from calib.commands.export import FORMATS
from calib.evaluate.request_files import known_keys
from calib.runtime.methods import METHODS, options_of

QUOTED = [command for name in documents() for command in inline_commands(text_of(name), name)]
BLOCKS = [command for name in documents() for command in block_commands(text_of(name), name)]
# Options that a command takes and its help does not list.
FURTHER = {
    "eval": known_keys(),
    "bench": BenchRequest.known(),
    "generate": sorted({option for name in METHODS for option in options_of(name)}),
}
FURTHER["export"] = FURTHER["tune"] = FURTHER["generate"]
# Options of other programs that the text quotes alone.
OTHERS = {"--kv-cache-dtype": "vllm", "--kv-cache-dtype-skip-layers": "vllm", "--revision": "hf"}


@cache
def help_text(words: tuple[str, ...]) -> str:
    """The output of `--help` of a `calib` command or a Python module."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        status = cli.main([*words[1:], "--help"]) if words[0] == "calib" else run_python([*words, "--help"])
        assert status == 0, words
    return printed.getvalue()


def options(command: Command) -> set[str]:
    """Names of a command's options."""
    return {word.partition("=")[0] for word in command.words[2:] if re.match(r"--\w", word)}


def known_options(command: Command) -> set[str]:
    """Names of all options that a command takes."""
    own = command.words[:2] if command.words[0] == "calib" else command.words[:3]
    if command.values("--format"):
        own += ("--format", *command.values("--format"))
    further = [f"--{name.replace('_', mark)}" for name in FURTHER.get(kind_of(command), ()) for mark in "_-"]
    told = help_text(own) + (
        help_text(("calib", "fit")) if kind_of(command) == "merge" else ""
    )  # merge takes the options of fit
    return {*re.findall(r"--[\w.-]+", told), *further}


OURS = [one for one in QUOTED + BLOCKS if one.words[0] == "calib"]
MODULES = [one for one in QUOTED + BLOCKS if re.search(r"python3?$", one.words[0])]


def test_commands_of_ours_exist_and_have_the_options():
    wrong = [
        f"{one.document}:{one.line}: {one}: {sorted(unknown)}"
        for one in OURS
        if (unknown := {one.words[1]} - {*cli.COMMANDS} or options(one) - known_options(one))
    ]
    assert not wrong and len(OURS) > 60


def test_modules_and_scripts_exist_and_have_the_options():
    for one in MODULES:
        if one.words[1] != "-m":
            assert (ROOT / one.words[1]).is_file(), one
        else:
            assert find_spec(one.words[2]), one
            assert not options(one) or options(one) <= known_options(one), one
    assert len(MODULES) > 10


def test_options_alone_are_those_of_some_command():
    """Options that running text quotes without a command, such as `--headroom 2`."""
    formats = [("export", "--format", name) for name in FORMATS]
    ours = [Command("", 0, ("calib", *words)) for words in [*((name,) for name in cli.COMMANDS), *formats]]
    modules = [one for one in MODULES if one.words[1] == "-m" and options(one)]
    known = {*re.findall(r"--\w+", help_text(("calib",)))}.union(*map(known_options, ours + modules))
    quoted = [(name, option) for name in documents() for option in re.findall(r"(?<!`)`(--\w[\w.-]*)", text_of(name))]
    assert len(quoted) > 40
    assert not [(name, option) for name, option in quoted if option not in known | OTHERS.keys()]
    assert OTHERS.keys() <= {option for _, option in quoted} - known


def test_extras_to_install_exist():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = [
        (one, extra)
        for one in QUOTED + BLOCKS
        if "install" in one.words
        for found in re.findall(r"(?:calib-kv|\.)\[([\w,-]+)\]", str(one))
        for extra in found.split(",")
    ]
    assert asked and not [f"{one.document}:{one.line}: {extra}" for one, extra in asked if extra not in known]


def test_targets_of_make_are_documented_and_print_what_they_would_do():
    """A target is documented by `##` and its purpose in its line of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    told = {name for names in re.findall(r"^([\w -]+):.*##", makefile, re.M) for name in names.split()}
    lines = {one.words[1:] for one in QUOTED + BLOCKS if one.words[0] == "make"}
    assert len(lines) > 10 and {words[0] for words in lines} <= told
    for words in sorted(lines):
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
