"""The walk through a decode step in docs/concepts.md names the files that a step uses, and their lengths and the numbers of calls
are right within 10 % or 10 lines."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cases import BY_NAME
from toy_models import VOCABULARY, left_padded, random_model

from calib.runtime import compress

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"^\| `([\w/]+\.py)` \| (\d+) \|", re.MULTILINE)
PAGE = (ROOT / "docs" / "concepts.md").read_text()
LINES = {name: int(lines) for name, lines in TABLE.findall(PAGE)}
CALLS = re.findall(
    r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.partition("\n## How far it goes\n")[2], re.MULTILINE
)
FOLDERS = tuple(str(ROOT / name) for name in ("runtime", "kernels"))


@torch.no_grad()
def attend_files(name: str) -> set[str]:
    """Files of `runtime` with a function that is called in a decode step of a case."""
    model, found = random_model("llama"), set()
    with BY_NAME[name].open(model) as cache:
        token = model(**left_padded([90]), past_key_values=cache).logits[:, -1:].argmax(-1)

        def seen(frame, event, argument):
            path = Path(frame.f_code.co_filename).resolve()
            if event == "call" and path.is_relative_to(ROOT / "runtime"):
                found.add(str(path.relative_to(ROOT)))

        sys.setprofile(seen)
        try:
            model(token, past_key_values=cache)
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", ["full", "kivi-2-short", "mikv-16-2"])
def test_the_files_that_attend_are_in_the_walk(name):
    attending = {file for file in attend_files(name) if "/attend/" in file or file.endswith(("spans.py", "_view.py"))}
    assert attending and attending <= LINES.keys()


@pytest.mark.parametrize("file", LINES)
def test_a_file_is_as_long_as_the_walk_says(file):
    lines = len((ROOT / file).read_text().splitlines())
    assert abs(lines - LINES[file]) <= max(10, 0.1 * lines)


@torch.no_grad()
def calls_of_a_step(name: str) -> tuple[list[int], int]:
    """Calls of Python functions of `runtime` and `kernels` in each layer of the fourth forward, from `update` on, and the number of
    files of these functions."""
    torch.manual_seed(0)
    model, calls, files = random_model("llama"), [], set()
    with compress(model, name) as cache:
        token = torch.randint(VOCABULARY, (1, 300))
        for _ in range(3):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)

        def seen(frame, event, argument):
            path = str(Path(frame.f_code.co_filename).resolve())
            if event != "call" or not path.startswith(FOLDERS):
                return
            if path.endswith("runtime/layer.py") and frame.f_code.co_name == "update":
                calls.append(0)
            if calls:
                calls[-1] += 1
                files.add(path)

        sys.setprofile(seen)
        try:
            model(token, past_key_values=cache)
        finally:
            sys.setprofile(None)
    return calls, len(files)


@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))) and "CC" not in os.environ, reason="no C compiler"
)
@pytest.mark.parametrize(("name", "first", "other", "files"), CALLS)
def test_a_step_calls_as_many_functions_as_the_page_says(name, first, other, files):
    calls, found = calls_of_a_step(name)
    for measured, told in zip((*calls, found), map(int, (first, other, files)), strict=True):
        assert abs(measured - told) <= 0.1 * told, (calls, found)


def test_the_page_tells_the_calls_of_five_methods():
    assert len(CALLS) == 5
