"""benchmarks/gear_errors.py runs to its end over GEAR's rows of a configuration, and each correction lowers its errors."""

import json

from benchmarks import gear_errors, protocol

ROWS = """\
model: artifacts/tiny-llama
methods:
  - {name: full, method: full}
  - {name: codes, method: gear, bits: 2, outliers: 0.0, rank: 0}
  - {name: outliers too, method: gear, bits: 2, rank: 0}
  - {name: gear, method: gear, bits: 2}
  - {name: kivi's codes, method: gear, backbone: kivi}
tasks:
  - {task: retrieval, lines: [20], cases: 1}
"""


def test_a_small_run_is_printed_and_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.yaml").write_text(ROWS)
    monkeypatch.setattr(protocol, "RESULTS", tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["gear_errors", "--config", str(tmp_path / "rows.yaml"), "--lines", "12", "--write"]
    )
    gear_errors.main()
    run = json.loads((tmp_path / gear_errors.RESULT).read_text())
    assert list(run["rows"]) == ["codes", "outliers too", "gear", "kivi's codes"]  # the exact cache has no error
    printed = capsys.readouterr().out
    assert f"{run['tokens']} tokens" in printed and all(name in printed for name in run["rows"])
    for part in ("prompt", "blocks"):
        plain, sparse, both, _ = (row[part] for row in run["rows"].values())
        for stream in ("keys", "values"):
            assert plain[stream] > sparse[stream] > both[stream] > 0
