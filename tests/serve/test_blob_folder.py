"""The folder of blobs: file names, complete files only, and log messages if a file cannot be written or read."""

import logging
import os
import threading

import pytest
import torch
from one_line import message

from calib.runtime.files.atomic_file import atomically
from calib.serve.blob_folder import SUFFIX, BlobFolder
from calib.serve.refusals import Refusals

BLOB = torch.arange(200, dtype=torch.uint8)


def folder(path, identity="codec"):
    return BlobFolder(str(path), identity, Refusals(logging.getLogger("folder"), "calib refuses a chunk"))


def files(folder, pattern=f"*{SUFFIX}"):
    return [path for path in folder.rglob(pattern) if path.is_file()]


def test_a_blob_comes_back_under_its_key_and_identity_alone(tmp_path):
    own, other = folder(tmp_path / "new" / "one"), folder(tmp_path / "new" / "one", "another codec")
    assert own.write("../a", BLOB) and own.has("../a") and own.read("../a") == BLOB.numpy().tobytes()
    assert other.read("../a") is None and not other.has("../a") and not own.has("a")
    assert other.write("../a", BLOB[:3]) and own.read("../a") == BLOB.numpy().tobytes()
    assert len(files(tmp_path / "new" / "one")) == 2
    own.remove("../a")
    own.remove("never there")
    assert not own.has("../a") and other.has("../a")
    (tmp_path / "new" / "one" / "mine.txt").write_text("kept")
    own.clear()
    assert [path.name for path in files(tmp_path / "new" / "one", "*")] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be made") as error:
        folder(tmp_path / "file" / "below")
    message(error)


def test_a_full_disk_is_said_once_and_nothing_is_left(tmp_path, monkeypatch, caplog):
    own = folder(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device", "a name of its own for each file")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        assert [own.write(key, BLOB) for key in "abc"] == [False] * 3
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage() and "\n" not in record.getMessage()
    assert not files(tmp_path, "*") and own.read("a") is None


def test_a_folder_of_another_user_is_a_miss(tmp_path, monkeypatch, caplog):
    """A subfolder that another user's engine has made may deny access: blobs there are misses, and one line is logged."""
    own = folder(tmp_path)
    assert own.write("a", BLOB)
    below = f"{own._path('a').parent}{os.sep}"

    def keeping_out(call):
        def asked(path, *args, **kwargs):
            if os.fspath(path).startswith(below):
                raise PermissionError(13, "Permission denied")
            return call(path, *args, **kwargs)

        return asked

    with monkeypatch.context() as theirs, caplog.at_level(logging.WARNING):
        for name in ("stat", "mkdir", "unlink"):
            theirs.setattr(os, name, keeping_out(getattr(os, name)))
        theirs.setattr(os, "access", lambda path, mode: not os.fspath(path).startswith(below))
        assert not own.has("a") and not own.write("a", BLOB)
    (record,) = caplog.records
    assert "Permission denied" in record.getMessage() and own.has("a")


def test_a_file_that_cannot_be_read_is_said_once(tmp_path, caplog):
    own = folder(tmp_path)
    for key in "ab":
        own._path(key).mkdir(parents=True)  # a folder cannot be read as a file, even by root
    with caplog.at_level(logging.WARNING):
        assert [own.read(key) for key in "abc"] == [None] * 3
    (record,) = caplog.records
    assert "cannot be read (Is a directory)" in record.getMessage() and "\n" not in record.getMessage()


def test_a_file_that_may_not_be_read_is_a_miss_that_is_said_once_and_stored_again(tmp_path, monkeypatch, caplog):
    """A file without read permission, as another user's: if it counted as present, its chunk would be computed again at every
    request."""
    own = folder(tmp_path)
    for key in "ab":
        assert own.write(key, BLOB)
        own._path(key).chmod(0)

    def may(path, mode, call=os.access):  # root may read all
        return call(path, mode) and os.stat(path).st_mode & 0o400 > 0

    monkeypatch.setattr(os, "access", may)
    with caplog.at_level(logging.WARNING):
        assert not own.has("a") and not own.has("b") and not own.has("c")
    (record,) = caplog.records
    assert "cannot be read (Permission denied)" in record.getMessage() and "\n" not in record.getMessage()
    assert own.write("a", BLOB[:3]) and own.has("a") and own.read("a") == BLOB[:3].numpy().tobytes()
    assert not own.has("b") and own._path("b").stat().st_mode & 0o777 == 0, "nobody stored it again"


def test_what_a_killed_writer_left_goes_with_the_next_file_beside_it(tmp_path):
    own = folder(tmp_path)
    beside = own._path("a").with_name("another's")
    left = beside.with_name(f".{'0' * 50}.0123456789ab.tmp")
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"half")
    with atomically(beside) as live:
        live.write_bytes(b"live")
        assert own.write("a", BLOB) and not left.exists() and live.exists()
    assert beside.read_bytes() == b"live"


def test_a_reason_is_said_once_whatever_its_numbers(caplog):
    told = Refusals(logging.getLogger("refusals"), "calib refuses a chunk")
    said = ["begins at 64, expected 128", "of artifact 9a3f", "of no artifact"]
    with caplog.at_level(logging.WARNING):
        for text in (said[0], "begins at 192, expected 0", said[1], "of artifact ff01", said[2]):
            told.tell(ValueError(text))
    assert [record.getMessage() for record in caplog.records] == [f"calib refuses a chunk: {text}" for text in said]


def test_readers_beside_writers_see_a_whole_blob_or_none(tmp_path):
    own, seen, over = folder(tmp_path), set(), threading.Event()
    blobs = [torch.full((100_000,), value, dtype=torch.uint8) for value in range(4)]

    def read():
        while not over.is_set():
            seen.add(own.read("a"))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(40):
        assert own.write("a", blobs[turn % 4])
    over.set()
    for thread in threads:
        thread.join()
    assert seen <= {None, *(blob.numpy().tobytes() for blob in blobs)} and len(seen) > 1
