"""benchmarks/dictionary_loss.py runs to its end, and keeps the rows of streams that it was not asked for."""

import json

from benchmarks import dictionary_loss as benchmark
from benchmarks import protocol


def test_a_small_run_is_kept_beside_other_streams(tmp_path, monkeypatch):
    data, options = benchmark.CaptureData, benchmark.DictionaryOptions
    small = {"name": "generated", "length": 128, "sequences": 2, "heldout_sequences": 1}
    monkeypatch.setattr(benchmark, "CaptureData", lambda path, seed, **_: data(path, seed=seed, **small))
    monkeypatch.setattr(benchmark, "DictionaryOptions", lambda: options(epochs=1))
    for module in (protocol, benchmark):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / benchmark.RESULT).write_text(json.dumps({"rows": [{"stream": "keys"}, {"stream": "rotated keys"}]}))
    benchmark.main("artifacts/tiny-llama", ["rotated keys"], True)
    first, *rows = json.loads((tmp_path / benchmark.RESULT).read_text())["rows"]
    assert first == {"stream": "keys"} and [row["sparsity"] for row in rows] == [4, 8]
    assert all(0 < row["loss"] < 1 and len(row["epochs"]) == 2 for row in rows)
