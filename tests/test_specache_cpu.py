"""benchmarks/specache_cpu.py runs to its end and counts the pairs that a step fetches."""

import json

import pytest

from benchmarks import protocol, specache_cpu


@pytest.mark.full
def test_a_small_run_is_printed_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "RESULTS", tmp_path)
    monkeypatch.setattr(protocol, "PAUSE", 0)
    words = "specache_cpu --model artifacts/tiny-llama --contexts 160 --batches 1 --k 4 --turns 2 --steps 1 --write"
    monkeypatch.setattr("sys.argv", words.split())
    specache_cpu.main()
    [run] = json.loads((tmp_path / specache_cpu.RESULT).read_text())["runs"]
    assert 0 < run["rows"][0] <= run["rows"][1] == 4 and list(run["ratios"]) == list(specache_cpu.RATIOS)
    assert f"{run['rows'][0]} of 4 pairs fetched a step" in capsys.readouterr().out
