"""docs/serve/vllm.md: its table has the figures of the committed measurement, and the connector accepts its JSON."""

import json
import re
from dataclasses import fields
from pathlib import Path

from calib.serve.vllm.options import Options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serve/vllm.md").read_text(encoding="utf-8")
NAMES = {
    "computed": "computed",
    "reused": "reused",
    "reused together": "reused, four at a time",
    "damaged": "damaged",
    "two ranks, computed": "two ranks, computed",
    "two ranks, reused": "two ranks, reused",
}


def test_the_table_is_the_measurement():
    result = json.loads((ROOT / "benchmarks/results/vllm_reuse.json").read_text(encoding="utf-8"))
    assert (result["bits"], result["chunk_tokens"]) == (2, 256) and [row["run"] for row in result["rows"]] == list(
        NAMES
    )
    for row in result["rows"]:
        cells = (NAMES[row["run"]], row["reused_tokens"], f"{row['right']} of {row['of']}", row["same_answers"])
        assert f"| {' | '.join(map(str, cells))} | {row['bytes_per_token']:,.0f} |\n" in PAGE


def test_the_configuration_is_taken():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    transfer = json.loads(text)
    options = Options.of(transfer.pop("kv_connector_extra_config"))
    assert options == Options("my.calib.safetensors", "/cache/my-llama", 2)
    assert transfer == {
        "kv_connector": "CalibConnector",
        "kv_connector_module_path": "calib.serve.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    for field in fields(Options):
        assert f"| `{field.name}` |" in PAGE
