"""Reads a `results.json` of `calib bench` and checks the entries that its curves need."""

from typing import Any

from calib.bench.document import FORMAT
from calib.bench.request import AGAIN
from calib.evaluate.run_file import entry, is_number, read_results, require


def read_bench_run(name: str) -> dict[str, Any]:
    """Returns the run in the file `name`; raises UsageError if it is missing or not a run of `calib bench`."""
    return read_results(name, "calib bench", check)


def check(content: object) -> None:
    """Raises ValueError that names the first missing or wrong entry of such a run."""
    require(isinstance(content, dict) and content.get("format") == FORMAT, f"its format is not {FORMAT}")
    assert isinstance(content, dict)
    for key, kind in (("config", dict), ("model", dict), ("versions", dict), ("machine", dict), ("cells", list)):
        entry(content, key, kind, key)
    texts, counts = ("model", "dtype", "device", "baseline"), ("new_tokens", "turns", "seed")
    for key, kind in (*((key, str) for key in texts), *((key, int) for key in counts)):
        entry(content["config"], key, kind, f"config.{key}")
    for key in ("batches", "contexts"):
        entry(content["config"], key, list, f"config.{key}")
        require(all(type(n) is int for n in content["config"][key]), f"config.{key} are no whole numbers")
    require(is_number(content["model"].get("bytes")), "model.bytes is no number")
    for position, cell in enumerate(content["cells"]):
        for key, kind in (("name", str), ("batch", int), ("context", int)):
            entry(cell, key, kind, f"cells[{position}].{key}")
        if "error" not in cell:
            speeds = cell.get("tokens_per_second")
            three = isinstance(speeds, list) and len(speeds) == 3 and all(map(is_number, speeds))
            require(three, f"cells[{position}].tokens_per_second are not three numbers")
            if cell["name"] != content["config"]["baseline"] + AGAIN:  # the second row is timed only
                entry(cell, "sizes", dict, f"cells[{position}].sizes")
                known = is_number(cell["sizes"].get("measured_bytes"))
                require(known, f"cells[{position}].sizes.measured_bytes is no number")
