"""The table of docs/serve/lmcache.md has the figures of the committed measurement."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = {"computed": "computed", "plain": "reused, 16 bits", "calib": "reused, 2 bits"}


def test_the_table_is_the_measurement():
    page = (ROOT / "docs/serve/lmcache.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/lmcache_reuse.json").read_text(encoding="utf-8"))
    assert result["bits"] == 2 and [row["run"] for row in result["rows"]] == list(NAMES)
    for row in result["rows"]:
        size = f"{row['bytes_per_token']:,.0f} " if "bytes_per_token" in row else ""
        cells = (NAMES[row["run"]], row["reused_tokens"], f"{row['right']} of {row['of']}", row["same_answers"])
        assert f"| {' | '.join(map(str, cells))} | {size}|\n" in page
