"""Writes the counts of the campaigns as one page.

    python tests/hostile/report.py runs/hostile

Reads `artifacts.json`, `prefixes.json`, `blobs.json` and `kills.json` of that folder; a campaign without a file keeps its last run.
Writes `benchmarks/results/hostile.json` and `docs/results/hostile.md`. The status is 1 if a count that must be 0 is not.
"""

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks/results/hostile.json"
PAGE = ROOT / "docs/results/hostile.md"
FILES = ("refused", "accepted", "tracebacks", "hangs", "over_memory", "nan")
KILLS = ("kills", "resumed_to_same_bytes", "wrong_status", "wrong_lines", "tracebacks", "hangs", "left_files")
CAMPAIGNS = ("artifacts", "prefixes", "blobs", "kills")
MUST_BE_0 = {"tracebacks", "hangs", "over_memory", "nan", "wrong_status", "wrong_lines", "left_files"}
HEAD = """# Hostile files and interrupts

    make hostile

Four campaigns (`tests/hostile`); a sample of each is part of every test run. Every case has a number, and a seed and a number
give the case again. The runs are in `benchmarks/results/hostile.json`, each with the versions that it ran with.
`make hostile-blobs` renews one of them, in minutes.

- **Artifacts** and **prefix files** are damaged byte by byte, cut, or forged with valid checksums: numbers (NaN, infinity, 3e38,
  1e-38), shapes, dtypes, names, page tables, indices, nested documents. Each file is loaded and, where it is accepted, used for a
  prompt and a few steps. It must be refused in one printable line of at most 400 characters or give finite logits, within a time
  limit and a memory limit.
- **Blobs** of [stored chunks](../serve/storage.md) are damaged as well: bits, numbers of the header, lengths that agree with
  each other, parts of other blobs, NaN in exact tokens; three of four get the checksum that fits. Each is decoded by the codec
  that made it: refused in such a line, with nothing written to the memory it was for, or finite. A fifth of the cases are prefix
  files of `cache.save(..., storage_bits=2)`, with a damaged blob or damaged otherwise, loaded and used as above.
- **Kills**: `calib fit` gets SIGKILL, SIGTERM or SIGINT at random moments, up to three times, and goes on with `--ckpt_path last`.
  The artifact must come out byte for byte as that of an undisturbed fit; statuses must be 143 and 130; no temporary file may be
  left.

All are seed 1. Kills ran three times more on the same code, seeds 5, 8 and 9 (the last two at once, beside prefix files, on
two cores): 150 fits, 279 kills, all to the same bytes, nothing else.

Earlier runs were not clean, and why is known by now:

- Kills, seed 1: 3 of 50 last attempts had not ended after 90 seconds on a busy machine. The limit is 200 seconds.
- Kills, seed 5: 3 fits ended by SIGINT itself, without calib's line. An interpreter with torch takes about a second to end after
  calib's last line, when its artifact is there; a SIGINT in that second ends the process itself (6 of 12 tried by hand did; a
  shell gives 130 all the same).
- Artifacts, seed 6: `calib inspect` refused 57 damaged records of `calib tune` in one line, but with status 1 instead of 2.
  Repaired.
- Prefix files, seed 1: the generator changed values that later cases drew from. Repaired.
"""


def table(names: tuple[str, ...], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Counts by campaign, as a Markdown table."""
    head = ["", "cases", *(name.replace("_", " ") for name in names)]
    lines = [head, ["---"] * len(head)]
    lines += [[title, *(f"{count[name]:,}" for name in ("cases", *names))] for title, count in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of docs/results/hostile.md."""
    files = {"artifacts": found["artifacts"], "prefix files": found["prefixes"], "blobs": found["blobs"]}
    return f"{HEAD}\n{table(FILES, files)}\n{table(KILLS, {'kills': found['kills']})}"


def wrong(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Descriptions of counts that must be 0 and are not, and of killed fits that did not end with the same bytes."""
    odd = [
        f"{name}: {kind} {count[kind]}" for name, count in found.items() for kind in MUST_BE_0 & {*count} if count[kind]
    ]
    kills = found["kills"]
    return odd + ([] if kills["resumed_to_same_bytes"] == kills["cases"] else ["kills: other bytes"])


def main(folder: Path) -> int:
    """Write both files from the runs in `folder`, and from the last run of a campaign that has none there."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    found = json.loads(RUN.read_text())
    for name in CAMPAIGNS:
        if (folder / f"{name}.json").exists():
            found[name] = {"versions": versions, **json.loads((folder / f"{name}.json").read_text())}
    RUN.write_text(json.dumps({name: found[name] for name in CAMPAIGNS}, indent=1) + "\n")
    PAGE.write_text(page(found))
    for line in wrong(found):
        print(line, file=sys.stderr)
    return 1 if wrong(found) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
