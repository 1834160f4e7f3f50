"""A folder that engines share: concurrent readers get complete pages or none, and a killed writer does not block the others."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sglang_engine import KEYS, PAGE, pool_of, slots, storage, texts, told

pytestmark = pytest.mark.arithmetic

ENGINES, ROUNDS = 4, 12
KILLED = """
import os, pathlib, signal, sys
from calib.runtime.files.atomic_file import atomically
with atomically(sys.argv[1]) as path:
    path.write_bytes(pathlib.Path(sys.argv[2]).read_bytes()[: int(sys.argv[3])])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def filled(artifact, count=3):
    """A pool with `count` filled pages, one for each key, and as many empty ones."""
    pool = pool_of(pages=2 * count)
    for page, chunk in enumerate(texts(artifact, 0, count)):
        pool.put(page * PAGE, chunk)
    return pool


def files_of(folder):
    """All files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def slowly(path, data):
    """`Path.write_bytes` in four pieces with pauses, so that other threads run in between."""
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), len(data) // 4):
            file.write(data[at : at + len(data) // 4])
            time.sleep(0.001)
    return len(data)


def test_readers_beside_writers_get_whole_pages_or_none(artifact, path, tmp_path, caplog, monkeypatch):
    """Four engines read all pages; two of them also store all, and one of these removes all every fourth round."""
    monkeypatch.setattr(Path, "write_bytes", slowly)
    first = storage(path, tmp_path / "alone", filled(artifact))
    assert all(first.batch_set_v1(KEYS, slots(0, 1, 2), told(0))) and all(
        first.batch_get_v1(KEYS, slots(3, 4, 5), told(0))
    )
    wanted = first._pages._buffer[:, :, 3 * PAGE :].clone()
    folder = tmp_path / "shared"

    def engine(number):
        own, hits = storage(path, folder, filled(artifact)), 0
        for round_ in range(ROUNDS):
            keys = KEYS[number % 3 :] + KEYS[: number % 3]
            pages = [KEYS.index(key) for key in keys]
            if number % 2:
                assert all(
                    own.batch_set_v1([key], slots(page), told(page)) for key, page in zip(keys, pages, strict=True)
                )
            own._pages._buffer[:, :, 3 * PAGE :] = 7
            for key, page in zip(keys, pages, strict=True):
                (hit,) = own.batch_get_v1([key], slots(3 + page), told(page))
                found = own._pages._buffer[:, :, (3 + page) * PAGE : (4 + page) * PAGE]
                expected = wanted[:, :, page * PAGE : (page + 1) * PAGE]
                assert torch.equal(found, expected) if hit else bool((found == 7).all())
                hits += hit
            if number == 1 and round_ % 4 == 3:
                own.clear()
        return hits

    with ThreadPoolExecutor(ENGINES) as pool:
        hits = list(pool.map(engine, range(ENGINES)))
    assert sum(hits) > ROUNDS  # pages were found
    assert not caplog.records  # no damaged page was seen
    left = files_of(folder)
    assert all(file.suffix == ".klt" for file in left) and len(left) <= len(KEYS)


@pytest.mark.full
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_writer_that_was_killed_leaves_a_miss(artifact, path, tmp_path, share):
    """Whatever share of a new page was written: it is a miss, and the next writer removes the temporary file."""
    source, folder = storage(path, tmp_path / "source", filled(artifact)), tmp_path / "shared"
    own = storage(path, folder, filled(artifact))
    assert source.batch_set_v1(KEYS[:1], slots(0), told(0)) == [True]
    (blob,) = files_of(tmp_path / "source")
    target = folder / blob.relative_to(tmp_path / "source")  # the same codec, so the same file name
    count = str(int(share * blob.stat().st_size))
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), str(blob), count], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(target.parent.iterdir())) == 1 and not target.exists()  # what it has left
    assert own.batch_exists(KEYS[:1]) == 0 and own.batch_get_v1(KEYS[:1], slots(3), told(0)) == [False]
    assert own.batch_set_v1(KEYS[:1], slots(0), told(0)) == [True]
    assert own.batch_get_v1(KEYS[:1], slots(3), told(0)) == [True]
    assert files_of(folder) == [target]
    assert target.read_bytes() == blob.read_bytes()
