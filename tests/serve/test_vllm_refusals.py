"""Engines that vLLM's KV connector does not support are refused in one line before they start."""

from types import SimpleNamespace

import pytest
import torch
from one_line import message
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm_serving import BLOCK, BLOCKS, CHUNK, HEADS, NAMES, SPEC, D, config, filled, groups, request

from calib.serve.vllm import connector as module
from calib.serve.vllm.connector import CalibConnector

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"artifact": None}, "no artifact"),
        ({"bits": 9}, "bits"),
        ({"chunk": 33}, "chunk is 33"),
        ({"shards": 2}, "no field 'shards'"),
        ({"transfer": {"kv_load_failure_policy": "fail"}}, "kv_load_failure_policy"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context"),
        ({"model": {"use_mla": True}}, "latent"),
        ({"model": {"uses_mrope": True}}, "several axes"),
        ({"model": {"get_head_size": lambda: 64}}, "64 channels"),
        ({"ranks": 3}, "rank 0 of 3"),
    ],
)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_what_cannot_be_served_is_one_line(path, tmp_path, change, words, role):
    with pytest.raises(ValueError, match=words) as error:
        CalibConnector(config(path, tmp_path, **change), role, groups())
    message(error)


def test_windows_groups_and_prompts_that_attend_both_ways_are_refused(path, tmp_path):
    window = groups(SlidingWindowSpec(**SPEC, sliding_window=64))
    two = SimpleNamespace(kv_cache_groups=groups().kv_cache_groups * 2)
    prefix = groups(FullAttentionSpec(**SPEC, non_causal=True))
    for found in (window, two, prefix):
        with pytest.raises(ValueError, match="whole text") as error:
            CalibConnector(config(path, tmp_path), KVConnectorRole.SCHEDULER, found)
        message(error)


def test_a_worker_without_memory_is_one_line(path, tmp_path):
    with pytest.raises(ValueError, match="no memory") as error:
        CalibConnector(config(path, tmp_path), KVConnectorRole.WORKER, groups()).get_finished(set())
    message(error)


def test_memory_of_another_model_is_one_line(path, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    made = CalibConnector(config(path, tmp_path), KVConnectorRole.WORKER, groups())
    with pytest.raises(ValueError, match="plain attention") as error:
        made.register_kv_caches({name: torch.zeros(BLOCKS, HEADS - 1, BLOCK, 2 * D).half() for name in NAMES})
    message(error)


def test_an_engine_that_takes_part_of_a_chunk_is_one_line(serving, text):
    filled(serving(), text)
    scheduler, own = serving().engine.scheduler, request(text)
    assert scheduler.get_num_new_matched_tokens(own, 0) == (4 * CHUNK, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([0, 1, 2],))
    with pytest.raises(ValueError, match="96 stored tokens") as error:
        scheduler.update_state_after_alloc(own, blocks, 3 * BLOCK)
    message(error)
