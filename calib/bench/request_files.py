"""A request out of YAML files and the words of the command line, as `calib eval` reads them.

calib bench --config bench/quick.yaml --batches 1 8 --memory 2GiB
calib bench --model FOLDER --methods full kivi --contexts 1024 4096
"""

from collections.abc import Sequence
from typing import Any

from calib.bench.request import LISTS, BenchRequest
from calib.config_files import find_config, read_config
from calib.evaluate.request_files import overrides


def read_bench(files: Sequence[str], words: Sequence[str]) -> BenchRequest:
    """The request; raises UsageError in one line for whatever is wrong with it."""
    content: dict[str, Any] = {}
    paths = [find_config(name, "bench") for name in files]
    for path in paths:
        content |= read_config(path, BenchRequest.known())
    content |= dict(overrides(words, BenchRequest.known(), LISTS))
    return BenchRequest.of(content, paths[-1].stem if paths else "bench")
