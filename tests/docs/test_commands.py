"""Every command in a code block of the documents runs at toy size: with status 0, and it writes the files that it names."""

import re
from importlib.util import find_spec

import pytest
import yaml
from documented import Command, block_commands, documents, text_of
from documented_runs import ADDITIONS, kind_of, run

from calib.statistics.residual_basis import residual_forms

# Commands that are not run here (a pattern of the whole command), and why.
NOT_RUN = {
    r"make .*": "two of them are what CI runs, the others take minutes to hours: test_quotations.py checks their recipes",
    r"vllm serve .*": "an engine, which `make vllm` and `make lmcache` run; tests/export reads exported folders with "
    "the loader of compressed-tensors",
    r"(python3 -m venv|\S*pip install) .*": "it installs, which .ci/run does by the Makefile",
    r"hf (auth|download) .*": "it asks the hub",
    r"\S*python -m benchmarks\.peers\.kvpress .* --press (?!none).*": "kvpress needs another transformers; "
    "tests/test_kvpress_peer.py runs the script over stand-ins",
    r"(python -m benchmarks\.gpu(\.counters)?|timeout .* (compute-sanitizer|ncu)) .*": "they need a GPU: "
    "tests/gpu_benchmarks/test_first_run.py reads them and holds them to what there is",
    r"python -m benchmarks\.gpu\.roofline .*": "it writes a page of the repository; tests/gpu_benchmarks/test_roofline.py runs it "
    "without",
    r"python -m benchmarks\.gpu\.launches": "every method, interpreted, takes minutes: "
    "tests/gpu_benchmarks/test_launches.py runs it for one, and counts the launches of all",
    r"python -m calib\.kernels\.ahead_of_time .*": "compiles in a process that interprets nothing: "
    "tests/kernels/test_ahead_of_time.py runs it for every operation",
}
COMMANDS = [command for name in documents() for command in block_commands(text_of(name), name)]


def reason(command: Command) -> str | None:
    """Why a command is not run."""
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, str(command))), None)


def shape(command: Command) -> tuple[str, ...]:
    """Words and environment of a command without the output, the number of threads and the folder of a configuration."""
    line = re.sub(r" --(output|threads) \S+", "", str(command))
    return (*re.sub(r"(--config )\S*/", r"\1", line).split(), *map(str, command.environment))


# The first command of each shape: pages of results repeat the documents' commands with other folders.
FIRST = {shape(command): command for command in reversed(COMMANDS) if reason(command) is None}
RUN = sorted(FIRST.values(), key=COMMANDS.index)


def options(command: Command) -> tuple[str, ...]:
    """The program and the names of the options."""
    words = str(command).split()
    return (*words[:2], *sorted(word.partition("=")[0] for word in words if word.startswith("--")))


def is_covered(one: tuple[str, ...], by: tuple[str, ...]) -> bool:
    """Whether a command with options `by` has all options of `one`, and more."""
    return one[:2] == by[:2] and set(one[2:]) < set(by[2:])


# CI runs the README's commands, and of the other documents' those whose options are not a part of another command's; of commands
# that differ only in values, such as another configuration, the first.
FIRST_OF_OPTIONS = {options(command): command for command in reversed(RUN)}
IN_CI = {
    command
    for own, command in FIRST_OF_OPTIONS.items()
    if command.document == "README.md" or not any(is_covered(own, other) for other in FIRST_OF_OPTIONS)
}


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=() if one in IN_CI else pytest.mark.slow) for one in RUN],
    ids=lambda command: f"{command.document}:{command.line}",
)
def test_a_documented_command_runs(command, sandbox, capsys):
    if "onnx" in command.values("--format") and find_spec("onnx") is None:
        pytest.skip("writing ONNX needs the package onnx")
    folder = sandbox.folder(command.document)
    sandbox.provide(command, folder)
    done = run(command, folder, capsys)
    assert done.status == 0, done.words
    assert not done.missing


def test_nothing_is_left_out_or_added_without_need():
    """Every pattern of `NOT_RUN` matches a command, every addition is used, and enough commands are run."""
    left = [str(command) for command in COMMANDS if reason(command)]
    assert not [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, line) for line in left)]
    assert {*ADDITIONS} <= {kind_of(command) for command in RUN}
    assert len(RUN) > 45 and {"fit", "export", "convert", "inspect", "methods"} <= {kind_of(command) for command in RUN}


@pytest.mark.parametrize("channels", [64, 96, 128, 256])
def test_the_fit_before_an_evaluation_has_the_bases_of_its_rows(channels):
    """The fit measures residual bases for GEAR's backbone and for MiKV's groups of half a head, for any head_dim."""
    command = next(one for one in COMMANDS if one.document == "docs/how_to_choose.md" and kind_of(one) == "fit")
    forms = yaml.safe_load(command.values("--model.residual_forms")[0])
    found = {(form.stream, form.name) for form in residual_forms(channels, forms)}
    half = f"1x{channels // 2}"
    assert found == {("keys", "*x1"), ("keys", half), ("values", "1x*"), ("values", half)}
