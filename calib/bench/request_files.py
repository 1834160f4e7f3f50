"""Reads a request from YAML files and command-line arguments, as `calib eval` does.

calib bench --config bench/quick.yaml --batches 1 8 --memory 2GiB
calib bench --model FOLDER --methods full kivi --contexts 1024 4096
"""

from collections.abc import Sequence
from typing import Any

from calib.bench.request import LISTS, BenchRequest
from calib.config_files import find_config, read_config
from calib.evaluate.request_files import overrides


def read_bench(files: Sequence[str], words: Sequence[str]) -> BenchRequest:
    """Returns the request; raises UsageError of one line for any error."""
    content: dict[str, Any] = {}
    paths = [find_config(name, "bench") for name in files]
    for path in paths:
        content |= read_config(path, BenchRequest.known())
    content |= dict(overrides(words, BenchRequest.known(), LISTS))
    return BenchRequest.of(content, paths[-1].stem if paths else "bench")
