"""The tables of docs/serve/storage.md are what benchmarks/storage_page.py writes from the committed runs."""

from benchmarks import storage_page


def test_the_tables_are_those_of_the_runs(tmp_path, monkeypatch):
    before = storage_page.PAGE.read_text()
    monkeypatch.setattr(storage_page, "PAGE", tmp_path / "storage.md")
    storage_page.PAGE.write_text(before)
    storage_page.main()
    assert storage_page.PAGE.read_text() == before
