"""Atomic writes: no temporary file stays, those of killed writers are removed, those of a running writer never."""

import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from calib.runtime.files.atomic_file import atomically, new_folder, write_atomically


def a_file(path: Path) -> None:
    with atomically(path) as own:
        own.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def a_file_by_a_library(path: Path) -> None:
    """Like `a_file`, by a library that replaces the temporary file it is given by a new one."""
    with atomically(path) as own:
        other = own.with_suffix(".other")
        other.write_bytes(b"half")
        os.replace(other, own)
        os.kill(os.getpid(), signal.SIGKILL)


def a_folder(path: Path) -> None:
    with new_folder(path) as own:
        (own / "a").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def killed(path: Path, write: Callable[[Path], None]) -> None:
    """Runs `write(path)`, which kills itself by SIGKILL, in a fork: that need not import torch once more."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about forks of a process with threads: this one only writes a file
        child = os.fork()
    if not child:
        try:
            write(path)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("left", [a_file, a_file_by_a_library, a_folder])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, left):
    path = tmp_path / "a"
    killed(path, left)
    assert len(list(tmp_path.iterdir())) == 1 and not path.exists()
    write_atomically(path, b"whole")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"whole"


def test_a_new_folder_removes_it_as_well(tmp_path):
    path = tmp_path / "a"
    killed(path, a_folder)
    with new_folder(path) as folder:
        (folder / "b").write_bytes(b"whole")
    assert list(tmp_path.iterdir()) == [path] and [entry.name for entry in path.iterdir()] == ["b"]


def test_a_live_writer_is_left_alone(tmp_path):
    path = tmp_path / "a"
    with atomically(path) as slow:
        slow.write_bytes(b"slow")
        killed(path, a_file)
        write_atomically(path, b"fast")
        assert path.read_bytes() == b"fast" and slow.read_bytes() == b"slow"
    assert path.read_bytes() == b"slow" and list(tmp_path.iterdir()) == [path]


def test_what_belongs_to_another_target_is_left_alone(tmp_path):
    killed(tmp_path / "ab", a_file)
    others = [tmp_path / ".a.tmp", tmp_path / ".a.0123456789ab.tmp.bak", tmp_path / ".a.0123456789ab.tmp"]
    for other in others:
        other.write_bytes(b"")  # the last is named like a temporary folder, and is a file
    before = set(tmp_path.iterdir())
    write_atomically(tmp_path / "a", b"whole")
    assert set(tmp_path.iterdir()) == before | {tmp_path / "a"}


def test_many_writers_at_once(tmp_path):
    path = tmp_path / "a"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_atomically(path, bytes([number]) * 100), range(200)))
    assert list(tmp_path.iterdir()) == [path] and len(set(path.read_bytes())) == 1


def test_what_is_no_file_is_refused_before_anything_is_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # as /dev/null would be, too
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    before = {entry: entry.lstat().st_ino for entry in tmp_path.iterdir()}
    for name, said in (("pipe", "Not a regular file"), ("link", "Not a regular file"), ("folder", "Is a directory")):
        with pytest.raises(OSError, match=said), atomically(tmp_path / name):
            pytest.fail("something was written")
    assert {entry: entry.lstat().st_ino for entry in tmp_path.iterdir()} == before


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, b"first")
    path.chmod(0o600)
    write_atomically(path, b"second")
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == b"second"


@pytest.mark.parametrize("name", ["n" * 255, "\U0001f512" * 63])
def test_every_name_that_the_file_system_takes_can_be_written(tmp_path, name):
    path = tmp_path / name
    killed(path, a_file)
    write_atomically(path, b"whole")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("name", "said"), [("new/", "Is a directory"), ("new/.", "Is a directory"), ("n\0w", "Zero byte")]
)
def test_a_name_of_no_file_is_refused(tmp_path, name, said):
    with pytest.raises(OSError, match=said):
        write_atomically(f"{tmp_path}/{name}", b"whole")
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_found_under_the_name_that_was_given(tmp_path):
    path = tmp_path / "a" / "b" / ".." / "c"
    write_atomically(path, b"whole")
    assert path.read_bytes() == b"whole"


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/report\.md'"):
        write_atomically(tmp_path / "report.md", b"whole")
    assert not list(tmp_path.iterdir())
