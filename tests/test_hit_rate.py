"""benchmarks/hit_rate.py runs to its end; no choice of tokens has more attention than the best one."""

import json

from benchmarks import hit_rate, protocol
from benchmarks.hit_rate_plot import SERIES, TASKS


def test_a_small_run_is_printed_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hit_rate, "FETCHED", (4,))
    monkeypatch.setattr(hit_rate, "LINES", 10)
    monkeypatch.setattr(hit_rate, "PREFILL", 100)
    monkeypatch.setattr(hit_rate, "PLOT", tmp_path / "hit_rate.svg")
    monkeypatch.setattr(protocol, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["hit_rate", "--cases", "1", "--sequences", "1", "--steps", "4", "--write"])
    hit_rate.main()
    printed, rows = capsys.readouterr().out, json.loads((tmp_path / hit_rate.RESULT).read_text())["rows"]
    assert [row["task"] for row in rows] == list(TASKS) and "<svg" in hit_rate.PLOT.read_text()
    for row in rows:
        assert f"{row['task']}, k = 4, guesses: {row['guesses']}" in printed
        assert row["best"]["top"] == [1, 1, 1, 1]
        for name in SERIES:
            assert all(0 < share <= 1 for share in row[name]["mass"])
        for name in ("guess", "greedy eviction"):  # of the same run as the best
            assert all(own <= best for own, best in zip(row[name]["mass"], row["best"]["mass"], strict=True))
