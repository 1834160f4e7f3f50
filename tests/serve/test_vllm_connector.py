"""vLLM's KV connector: chunks of prefixes are stored while they are computed, and loaded by later requests."""

import time
from types import SimpleNamespace

import pytest
import torch
from vllm_serving import BITS, BLOCK, BLOCKS, CHUNK, NAMES, file_of, filled, request, wanted

from calib.runtime import Codec

pytestmark = pytest.mark.arithmetic


def files(folder):
    return sorted((folder / "store").glob("*/*.klt"))


@pytest.mark.parametrize("pieces", [None, [50, 100, 1, 1, 100, 24], [1] * 276])
def test_a_prefix_comes_back_as_the_codec_has_it(artifact, serving, tmp_path, text, pieces):
    filled(serving(), text, pieces)
    codec = Codec.from_artifact(artifact, bits=BITS)
    sizes = [codec.size(CHUNK, at * CHUNK, torch.float16) for at in range(4)]
    assert sorted(file.stat().st_size for file in files(tmp_path)) == sorted(sizes)
    fresh, own = serving(), request(text)
    before = fresh.memory[0][NAMES[0]].clone()
    assert fresh.engine.begin(own) == 4 * CHUNK
    blocks = fresh.engine.tables["one"]
    assert torch.equal(fresh.held(0, blocks[:8]), wanted(artifact, text, range(4)))
    others = [block for block in range(BLOCKS) if block not in blocks[:8]]
    assert torch.equal(fresh.memory[0][NAMES[0]][others], before[others])
    fresh.engine.run(own, [20])
    assert fresh.computed == [("one", 256, 276)]
    assert len(files(tmp_path)) == 4


def test_every_rank_has_its_heads(artifact, serving, tmp_path, text):
    filled(serving(ranks=2), text)
    assert len(files(tmp_path)) == 8
    fresh = serving(ranks=2)
    assert fresh.engine.begin(request(text)) == 4 * CHUNK
    for rank in range(2):
        found = fresh.held(rank, fresh.engine.tables["one"][:8])
        assert torch.equal(found[:, :, :, 0], wanted(artifact, text, range(4))[:, :, :, rank])
    files(tmp_path)[0].unlink()  # a chunk is found only if all ranks have it
    again = serving(ranks=2)
    assert again.engine.begin(request(text)) < 4 * CHUNK


def test_ranks_that_share_a_head_share_its_files(serving, tmp_path, text):
    filled(serving(ranks=4), text)
    assert len(files(tmp_path)) == 8
    assert serving(ranks=4).engine.begin(request(text)) == serving(ranks=2).engine.begin(request(text)) == 4 * CHUNK


def test_what_the_engine_has_itself_is_left_as_it_is(artifact, serving, text):
    filled(serving(), text)
    fresh, own = serving(), request(text)
    shared = [fresh.engine.free.pop() for _ in range(3)]  # the first block of the second chunk is among them
    assert fresh.engine.begin(own, 3 * BLOCK, shared) == 4 * CHUNK - 3 * BLOCK
    held = fresh.held(0, fresh.engine.tables["one"][:8])
    assert bool((held[:, :, : 3 * BLOCK] == 7).all())
    assert torch.equal(held[:, :, 3 * BLOCK :], wanted(artifact, text, range(4))[:, :, 3 * BLOCK :])


def test_the_last_token_is_left_to_compute(serving, text):
    filled(serving(), text)
    assert serving().engine.begin(request(text[:, :, : 2 * CHUNK])) == CHUNK
    assert serving().engine.begin(request(text[:, :, : 2 * CHUNK + 1])) == 2 * CHUNK


def test_tokens_that_are_not_known_are_not_stored(serving, tmp_path, text):
    """Keys and values of draft tokens, and of tokens that are still being sampled, are computed before the tokens are known."""
    one, own = serving(), request(text)
    own.all_token_ids = own.all_token_ids[: CHUNK - 3]
    assert one.engine.begin(own) == 0
    one.engine.run(own, [CHUNK - 3, 4])  # four drafts fill the chunk
    one.engine.close()
    assert not files(tmp_path)


def test_a_chunk_is_stored_once_its_tokens_are_known(artifact, serving, text):
    one, own = serving(), request(text)
    ids = own.all_token_ids
    own.all_token_ids = ids[: CHUNK - 3]
    assert one.engine.begin(own) == 0
    one.engine.run(own, [CHUNK - 3, 4])
    own.num_computed_tokens -= 2  # two drafts were right
    own.all_token_ids = ids[: CHUNK - 1]
    one.engine.run(own, [1])
    own.all_token_ids = ids[:CHUNK]
    one.engine.run(own, [1])
    one.engine.close()
    fresh = serving()
    assert fresh.engine.begin(request(text)) == CHUNK
    assert torch.equal(fresh.held(0, fresh.engine.tables["one"][:2]), wanted(artifact, text, range(1)))


def test_a_preempted_request_loads_what_it_had_stored(serving, tmp_path, text):
    one, own = serving(), request(text)
    assert one.engine.begin(own) == 0
    one.engine.run(own, [200])
    written = file_of(one, own, 2)
    while not written.exists():
        time.sleep(0.01)
    one.engine.free += one.engine.tables.pop("one")
    assert one.engine.begin(own) == 3 * CHUNK
    one.engine.run(own, [text.shape[2] - 3 * CHUNK])
    one.engine.finish(own)
    one.engine.close()
    assert len(files(tmp_path)) == 4 and not one.engine.scheduler._scheduler._followed


@pytest.mark.parametrize(("role", "stored", "found"), [("kv_producer", 4, 0), ("kv_consumer", 0, 4 * CHUNK)])
def test_roles(serving, tmp_path, text, role, stored, found):
    filled(serving(transfer={"kv_role": role}), text)
    assert len(files(tmp_path)) == stored
    if not stored:
        filled(serving(), text)
    assert serving(transfer={"kv_role": role}).engine.begin(request(text)) == found


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 2},
        {"chunk": BLOCK},
        {"model": {"model": "my-llama-tuned"}},
        {"model": {"revision": "b"}},
        {"model": {"quantization": "fp8"}},
        {"model": {"hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 20000.0})}},
    ],
)
def test_other_engines_share_the_folder_and_no_file(serving, text, change):
    filled(serving(), text)
    assert serving(**change).engine.begin(request(text)) == 0
    assert serving().engine.begin(request(text)) == 4 * CHUNK


def test_resetting_the_cache_removes_the_files(serving, tmp_path, text):
    one = serving()
    filled(one, text)
    assert one.engine.scheduler.reset_cache() is True and not files(tmp_path)
    assert serving().engine.begin(request(text)) == 0
