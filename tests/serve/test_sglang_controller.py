"""The backend behind SGLang's own controller, host pool and factory, on a CPU; skipped if SGLang cannot be imported."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from one_line import message
from sglang_controller import HybridCacheController, ServerArgs, engine_of
from sglang_engine import BITS, HEADS, LAYERS, PAGE, D, texts

from calib.runtime import Codec
from calib.runtime.storage import Header
from calib.serve.sglang.backend import Storage
from calib.serve.sglang.options import Options
from calib.serve.sglang.pages import LAYOUTS

pytestmark = pytest.mark.arithmetic

SHAPE = LAYERS, HEADS, D, PAGE, 16 * PAGE
DOCUMENT = Path(__file__).parents[2] / "docs" / "serve" / "sglang.md"


def extra(path, into, **fields):
    """The extra config of the document with this artifact and folder."""
    text = re.search(r"```json\n(.*?)```", DOCUMENT.read_text(), re.S)[1]
    found = json.loads(text) | {"artifact": path, "folder": str(into), "bits": BITS}
    return found | {"prefetch_threshold": PAGE, **fields}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("told", [True, False])
def test_pages_pass_the_controllers_threads(artifact, path, tmp_path, monkeypatch, layout, told):
    """Five pages of one text in three batches, and its last page again as another node of the radix tree would store it."""
    fields = extra(path, tmp_path, hicache_storage_pass_prefix_keys=told, positions=1024)
    with engine_of(monkeypatch, layout, SHAPE, fields) as engine:
        chunks, source = texts(artifact, 0, 5), engine.pools.alloc(5 * PAGE)
        for slot, chunk in zip(source[::PAGE].tolist(), chunks, strict=True):
            engine.seen.put(slot, chunk)
        before = engine.seen.kv_buffer.clone()
        if layout in ("layer_first", "page_first"):  # of which each release has views by layer
            for role, refs in enumerate((engine.host.k_data_refs, engine.host.v_data_refs)):
                for layer, ref in enumerate(refs):
                    assert torch.equal(ref.flatten(0, -3), engine.seen.by_slot()[role, layer])
        assert isinstance(engine.backend, Storage) and engine.backed_up(source[: 4 * PAGE]) == 4 * PAGE
        assert engine.backed_up(source[4 * PAGE :], first=4) == PAGE
        keys, _ = engine.hashes(5)
        headers = [Header.read(engine.backend._folder.read(key)) for key in keys]
        assert [header.start for header in headers] == [at * PAGE for at in range(5)]
        assert torch.equal(engine.seen.kv_buffer, before)
        target, found, loaded = engine.prefetched(6)
        assert (found, loaded) == (5 * PAGE, 5 * PAGE)
        codec, memory = Codec.from_artifact(artifact, bits=BITS), engine.seen.by_slot()
        for at, chunk in enumerate(chunks):
            wanted = codec.decode(codec.encode(chunk, at * PAGE)).unflatten(-1, (HEADS, D))
            assert torch.equal(memory[:, :, target[at * PAGE : (at + 1) * PAGE]], wanted)
        kept = torch.ones(memory.shape[2], dtype=torch.bool)
        kept[target[: 5 * PAGE]] = False
        engine.seen.kv_buffer = before
        assert torch.equal(memory[:, :, kept], engine.seen.by_slot()[:, :, kept])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"folder": ""}, "folder of the extra config"),
        ({"interface_v1": 0}, "interface_v1 is 0"),
        ({"class_name": "Store"}, "Store"),
    ],
)
def test_a_wrong_extra_config_ends_the_start(path, tmp_path, monkeypatch, fields, words):
    with (
        pytest.raises((ValueError, AttributeError), match=words) as error,
        engine_of(monkeypatch, "page_first", SHAPE, extra(path, tmp_path, **fields)),
    ):
        pass
    message(error)


def test_sglang_takes_the_documents_command_and_extra_config(path, tmp_path):
    command = re.search(r"    sglang serve (.*?)\n\n", DOCUMENT.read_text(), re.S)[1].replace("\\\n", "")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(shlex.split(command))
    assert (given.page_size, given.enable_hierarchical_cache, given.hicache_storage_backend) == (64, True, "dynamic")
    file = tmp_path / "extra.json"
    file.write_text(json.dumps(extra(path, tmp_path)))
    fields, *_, passes = HybridCacheController.parse_storage_backend_extra_config(f"@{file}")
    assert passes is True and Options.of(fields) == Options(path, str(tmp_path), BITS)
