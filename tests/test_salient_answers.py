"""benchmarks/salient_answers.py runs to its end, and the most salient tokens have more of the attention than random ones would."""

import json

from benchmarks import protocol, salient_answers


def test_a_small_run_is_printed_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["salient_answers", "--cases", "2", "--lines", "6", "--write"])
    salient_answers.main()
    [row] = json.loads((tmp_path / salient_answers.RESULT).read_text())["rows"]
    printed = capsys.readouterr().out
    assert row["lines"] == 6 and all(f"{share:.3f}  {name}" in printed for name, share in row["kept"].items())
    assert row["kept"]["normalised, all rows: salient 60%"] > 0.6
