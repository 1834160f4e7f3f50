"""vLLM's KV connector with files that are damaged, missing or cannot be written: no wrong data is loaded, and the engine
continues."""

import logging
import os
import threading
import time

import pytest
import torch
from vllm_serving import CHUNK, file_of, filled, request, wanted

from calib.serve.stored_chunks import StoredChunks

pytestmark = pytest.mark.arithmetic


def files(folder):
    return sorted((folder / "store").glob("*/*.klt"))


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [flip, lambda file: file.write_bytes(b""), lambda file: file.write_bytes(b"x" * 500)])
@pytest.mark.parametrize("which", [0, 2, 3])
def test_a_damaged_file_is_computed_again_and_stored_again(artifact, serving, tmp_path, text, harm, which):
    writer = serving()
    own, whole = filled(writer, text), [file.read_bytes() for file in files(tmp_path)]
    harm(file_of(writer, own, which))
    fresh, own = serving(), request(text)
    assert fresh.engine.begin(own) == which * CHUNK
    blocks = fresh.engine.tables["one"]
    assert torch.equal(fresh.held(0, blocks[: 2 * which]), wanted(artifact, text, range(4))[:, :, : which * CHUNK])
    assert bool((fresh.held(0, blocks[2 * which : 8]) == 7).all())  # nothing written
    fresh.engine.run(own, [text.shape[2] - which * CHUNK])
    fresh.engine.close()
    assert [file.read_bytes() for file in files(tmp_path)] == whole


def test_a_preempted_request_stores_its_own_damaged_chunk_again(serving, tmp_path, text):
    one, own = serving(), request(text)
    assert one.engine.begin(own) == 0
    one.engine.run(own, [3 * CHUNK])
    stored = [file_of(one, own, index) for index in range(3)]
    while not all(file.exists() for file in stored):
        time.sleep(0.01)
    whole = stored[1].read_bytes()
    flip(stored[1])
    one.engine.free += one.engine.tables.pop("one")
    assert one.engine.begin(own) == CHUNK
    one.engine.run(own, [text.shape[2] - CHUNK])
    one.engine.close()
    assert stored[1].read_bytes() == whole and len(files(tmp_path)) == 4


def test_a_file_that_goes_between_lookup_and_load_is_computed_again(serving, tmp_path, text):
    filled(serving(ranks=2), text)
    fresh, own = serving(ranks=2), request(text)
    looked = fresh.engine.scheduler.get_num_new_matched_tokens
    gone = files(tmp_path)

    def racing(*asked):
        found = looked(*asked)
        for file in gone:
            file.unlink(missing_ok=True)
        return found

    fresh.engine.scheduler.get_num_new_matched_tokens = racing
    assert fresh.engine.begin(own) == 0
    fresh.engine.run(own, [text.shape[2]])
    fresh.engine.close()
    assert files(tmp_path) == gone


def test_what_cannot_be_loaded_nor_removed_is_not_tried_for_ever(serving, tmp_path, text, monkeypatch):
    filled(serving(), text)
    for file in files(tmp_path):
        flip(file)
    fresh, own = serving(), request(text)
    monkeypatch.setattr(type(fresh.engine.scheduler._folder), "remove", lambda self, key: None)
    assert fresh.engine.begin(own) == 0
    assert fresh.engine.scheduler.get_num_new_matched_tokens(own, 0) == (0, False)
    other = request(text, "two")
    assert fresh.engine.scheduler.get_num_new_matched_tokens(other, 0)[0] == 4 * CHUNK


def test_a_file_under_another_chunks_name_is_refused(serving, text):
    writer = serving()
    own = filled(writer, text)
    file_of(writer, own, 1).write_bytes(file_of(writer, own, 2).read_bytes())
    assert serving().engine.begin(request(text)) == CHUNK


@pytest.mark.parametrize("steps", [1, 0])
def test_what_waits_to_be_stored_is_dropped_when_the_folder_is_cleared(serving, tmp_path, text, monkeypatch, steps):
    """As after an update of the weights: keys and values of the old weights must not be stored for the new ones."""
    over, store = threading.Event(), StoredChunks.store

    def slowly(self, *chunk):
        over.wait()
        return store(self, *chunk)

    monkeypatch.setattr(StoredChunks, "store", slowly)
    one, own = serving(), request(text)
    assert one.engine.begin(own) == 0
    one.engine.run(own, [text.shape[2]])
    one.engine.finish(own)
    assert one.engine.scheduler.reset_cache()
    over.set()
    for _ in range(steps):  # with 0 steps the engine ends at once
        one.engine.step({})
    one.engine.close()
    assert not files(tmp_path)


def test_a_full_disk_is_said_once_and_the_engine_goes_on(serving, tmp_path, text, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "vllm"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        one = serving()
        filled(one, text)
    assert len([record for record in caplog.records if "No space left" in record.getMessage()]) == 1
    assert one.computed == [("one", 0, 276)] and not [found for found in tmp_path.rglob("*") if found.is_file()]
