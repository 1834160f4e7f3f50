"""SGLang's storage backend: the calls of SGLang's cache controller, in every layout of its host memory."""

from dataclasses import replace

import pytest
import torch
from one_line import message
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageExtraInfo
from sglang_engine import BITS, HEADS, KEYS, LAYERS, PAGE, D, config, pool_of, slots, storage, texts, told

from calib.runtime import Codec
from calib.runtime.files import canonical_json
from calib.runtime.storage import Header
from calib.serve.sglang import releases
from calib.serve.sglang.backend import Storage
from calib.serve.sglang.pages import LAYOUTS

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", ["told", "looked for"])
def test_pages_come_back_as_the_codec_has_them_and_nothing_else_is_touched(artifact, path, tmp_path, layout, start):
    chunks, before = texts(artifact, 2 * PAGE), told(2) if start == "told" else HiCacheStorageExtraInfo()
    source, target = pool_of(layout), pool_of(layout)
    for page, chunk in zip((4, 0, 2), chunks, strict=True):
        source.put(page * PAGE, chunk)
    writer, reader = storage(path, tmp_path, source), storage(path, tmp_path, target)
    assert isinstance(writer, HiCacheStorage) and reader.batch_exists(KEYS) == 0
    assert writer.batch_set_v1(KEYS, slots(4, 0, 2), before) == [True] * 3
    assert reader.batch_exists([*KEYS, "dd"]) == 3
    assert reader.batch_get_v1(KEYS, slots(1, 3, 0), before) == [True] * 3
    codec, found = Codec.from_artifact(artifact, bits=BITS), target.by_slot()
    for page, chunk, start_of in zip((1, 3, 0), chunks, (2, 3, 4), strict=True):
        wanted = codec.decode(codec.encode(chunk, start_of * PAGE)).unflatten(-1, (HEADS, D))
        assert torch.equal(found[:, :, page * PAGE : (page + 1) * PAGE], wanted)
    for page in (2, 4):
        assert bool((found[:, :, page * PAGE : (page + 1) * PAGE] == 7).all())
    size = codec.size(PAGE, 2 * PAGE, torch.float16)
    assert [file.stat().st_size for file in tmp_path.rglob("*.klt")] == [size] * 3 and size < chunks[0].nbytes / 4


@pytest.fixture
def release(monkeypatch):
    """A function that sets the installed release of SGLang; None: SGLang is not installed."""

    def installed(number):
        def found(package):
            assert package == "sglang"
            if number is None:
                raise releases.PackageNotFoundError
            return number

        monkeypatch.setattr(releases, "version", found)

    return installed


def stored_pages(own, pool, artifact, first, count, name, before):
    """Stores pages of a text from page `first` on; returns the positions in their files."""
    keys = [f"{name}{first + at}" for at in range(count)]
    for page, chunk in enumerate(texts(artifact, first * PAGE, count)):
        pool.put(page * PAGE, chunk)
    assert own.batch_set_v1(keys, slots(*range(count)), told(before)) == [True] * count
    return [Header.read(own._folder.read(key)).start // PAGE for key in keys]


@pytest.mark.parametrize(
    ("number", "every"),
    [("0.5.15.post1", False), ("0.5.20", False), ("0.5.21", True), ("0.6.0.dev1", True), ("1.0", True), (None, True)],
)
def test_the_release_says_whether_every_page_is_reported(release, number, every):
    release(number)
    assert releases.reports_every_page() is every


def test_before_0_5_21_all_batches_of_a_long_text_are_told_to_begin_it(artifact, path, tmp_path, release):
    """There SGLang's controller adds a batch's pages to `prefix_keys` only if there are some already."""
    release("0.5.20")
    pool = pool_of()
    own = storage(path, tmp_path, pool)

    def store(first, count, name):
        return stored_pages(own, pool, artifact, first, count, name, before=0)

    for name in "ab":  # a text in three batches, the last of which is shorter; then another one
        assert [store(0, 2, name), store(2, 2, name), store(4, 1, name)] == [[0, 1], [2, 3], [4]]
    assert [store(0, 2, "c"), store(0, 2, "d"), store(2, 2, "d"), store(0, 1, "e")] == [[0, 1], [0, 1], [2, 3], [0]]


def test_since_0_5_21_the_reported_pages_alone_tell_the_position(artifact, path, tmp_path, release, monkeypatch):
    """The first page of a new text may have keys that fit position 0 badly, so none are read."""
    release("0.5.21")
    monkeypatch.setattr(Codec, "start_of", lambda *_: pytest.fail("read keys"))
    pool = pool_of()
    own = storage(path, tmp_path, pool)
    for name in "ab":
        assert stored_pages(own, pool, artifact, 0, 2, name, before=0) == [0, 1]
        assert stored_pages(own, pool, artifact, 2, 2, name, before=2) == [2, 3]
    # Two texts of one batch each.
    assert [stored_pages(own, pool, artifact, 0, 2, name, before=0) for name in "cd"] == [[0, 1], [0, 1]]


def test_ranks_of_tensor_parallelism_have_files_and_heads_of_their_own(artifact, path, tmp_path):
    (chunk,) = texts(artifact, PAGE, 1)
    rows, codec = chunk.unflatten(-1, (HEADS, D)), Codec.from_artifact(artifact, bits=BITS)
    whole = codec.decode(codec.encode(chunk, PAGE)).unflatten(-1, (HEADS, D))
    for rank in range(2):
        pool = pool_of(heads=1)
        pool.put(0, rows[..., rank, :].contiguous())
        own = storage(path, tmp_path, pool, rank=rank, ranks=2)
        assert own.batch_set_v1(["aa"], slots(0), told(1)) == own.batch_get_v1(["aa"], slots(1), told(1)) == [True]
        assert torch.equal(pool.by_slot()[:, :, PAGE : 2 * PAGE, 0], whole[..., rank, :])
    assert len(list(tmp_path.rglob("*.klt"))) == 2


def test_what_cannot_be_used_is_a_miss_and_can_be_stored_again(artifact, path, tmp_path):
    chunks, pool = texts(artifact, 0), pool_of()
    for page, chunk in enumerate(chunks):
        pool.put(page * PAGE, chunk)
    own = storage(path, tmp_path, pool)
    assert all(own.batch_set_v1(KEYS, slots(0, 1, 2), told(0)))
    damaged = own._folder._path(KEYS[1])
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert own.batch_get_v1(KEYS, slots(3, 4, 4), told(0)) == [True, False, False]
    assert bool((pool.by_slot()[:, :, 4 * PAGE :] == 7).all())  # nothing written
    assert own.batch_exists(KEYS) == 1
    assert all(own.batch_set_v1(KEYS, slots(0, 1, 2), told(0))) and all(own.batch_get_v1(KEYS, slots(3, 4, 3), told(0)))
    own.clear()
    assert own.batch_exists(KEYS) == 0


def test_engines_of_another_budget_share_the_folder(artifact, path, tmp_path):
    (chunk,), pool = texts(artifact, 0, 1), pool_of()
    pool.put(0, chunk)
    own, other = storage(path, tmp_path, pool), storage(path, tmp_path, pool, bits=2)
    assert own.batch_set_v1(KEYS[:1], slots(0), told(0)) == [True] and other.batch_exists(KEYS[:1]) == 0
    assert other.batch_get_v1(KEYS[:1], slots(1), told(0)) == [False]
    assert other.batch_set_v1(KEYS[:1], slots(0), told(0)) == [True]
    assert all(one.batch_get_v1(KEYS[:1], slots(1), told(0)) == [True] for one in (own, other))
    assert len(list(tmp_path.rglob("*.klt"))) == 2


def test_engines_of_another_dtype_keep_each_others_pages(artifact, path, tmp_path):
    pools = [pool_of(dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    for pool in pools:
        pool.put(0, texts(artifact, 0, 1, pool.dtype)[0])
    engines = [storage(path, tmp_path, pool) for pool in pools]
    assert engines[0].batch_set_v1(KEYS[:1], slots(0), told(0)) == [True] and not engines[1].exists(KEYS[0])
    assert engines[1].batch_set_v1(KEYS[:1], slots(0), told(0)) == [True]
    assert all(one.batch_get_v1(KEYS[:1], slots(1), told(0)) == [True] for one in engines)


def test_a_fine_tuned_model_of_another_name_shares_no_page(artifact, path, tmp_path):
    """SGLang's page hashes depend on the tokens only, and the artifact may fit both models: the model's name keeps them apart."""
    pool = pool_of()
    pool.put(0, texts(artifact, 0)[0])
    engines = [storage(path, tmp_path, pool, model_name=name) for name in ("my-llama", "my-llama-tuned")]
    assert engines[0].batch_set_v1(KEYS[:1], slots(0), told(0)) == [True]
    assert [one.exists(KEYS[0]) for one in engines] == [True, False]


def test_pages_of_no_text_are_not_stored(artifact, path, tmp_path):
    pool = pool_of()
    pool.put(0, torch.randn(2, LAYERS, PAGE, HEADS * D, generator=torch.Generator().manual_seed(0)).half() * 50)
    pool.kv_buffer[:, :, PAGE : 2 * PAGE] = torch.nan
    own = storage(path, tmp_path, pool)
    assert own.batch_set_v1(KEYS[:1], slots(0)) == [False]  # keys that fit no position
    assert own.batch_set_v1(KEYS[:1], slots(1), told(0)) == [False]
    assert not list(tmp_path.rglob("*.klt"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"artifact": None}, "no artifact"),
        ({"folder": None}, "no folder"),
        ({"folder": ""}, "folder of the extra config is '', .*not empty; write"),
        ({"folder": 3}, "folder of the extra config is 3, expected a string"),
        ({"entropy": "false"}, "entropy of the extra config is 'false', expected true or false; .*without quotes"),
        ({"entropy": True}, "'storage', which the artifact lacks; fit with .*storage true`, or leave entropy out"),
        ({"entropy": True, "trellis": True}, "no trellis, got trellis=True; leave one of them out"),
        ({"interface_v1": 0}, "interface_v1 is 0"),
        ({"interface_v1": None}, "interface_v1 is None"),
        ({"positions": 0}, "positions"),
        ({"bits": 9}, "bits"),
        ({"pp_size": 2}, "pipeline"),
        ({"is_mla_model": True}, "latent"),
    ],
)
def test_wrong_options_are_one_line(path, tmp_path, fields, words):
    with pytest.raises(ValueError, match=words) as error:
        Storage(config(path, tmp_path, **fields), {})
    message(error)


@pytest.mark.parametrize("longest", [{}, {"max_position_embeddings": 0}], ids=str)
def test_a_model_that_says_no_longest_text_needs_the_option(artifact, tmp_path, longest):
    found = {name: part for name, part in artifact.fingerprint["config"].items() if name != "max_position_embeddings"}
    found |= longest
    of_model = artifact.fingerprint | {"config": found, "config_hash": canonical_json.sha256(found)}
    replace(artifact, fingerprint=of_model).save(tmp_path / "a.safetensors")
    path = str(tmp_path / "a.safetensors")
    with pytest.raises(
        ValueError, match=r"^max_position_embeddings .* expected a whole number from 1; give .*positions"
    ) as error:
        Storage(config(path, tmp_path, positions=None), {})
    message(error)
    assert Storage(config(path, tmp_path, positions=1024), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"layout": "page_first_kv_split"},
            "page_first_kv_split, expected layer_first, .*; start SGLang with --hicache-mem-layout",
        ),
        ({"kv_buffer": None}, "HostPool, expected one tensor .*another backend"),
        ({"kv_buffer": (torch.zeros(2), torch.zeros(2))}, "HostPool, expected one tensor"),
        ({"layer_num": 3}, "3 layers .* without pipeline stages and draft layers"),
        ({"head_dim": 64}, "64"),
        ({"head_num": 3}, "3 KV heads"),
        ({"dtype": torch.float8_e4m3fn}, "float8"),
    ],
)
def test_memory_of_another_model_is_refused(path, tmp_path, change, words):
    pool = pool_of()
    for name, value in change.items():
        setattr(pool, name, value)
    with pytest.raises(ValueError, match=words) as error:
        storage(path, tmp_path, pool)
    message(error)


@pytest.mark.parametrize("name", ["draft", "swa", "mamba", "indexer"])
def test_pools_beside_keys_and_values_are_refused(path, tmp_path, name):
    """With such pools SGLang calls `batch_exists_v2` instead, so nothing would be stored at all."""
    own = storage(path, tmp_path, pool_of())
    own.register_mem_host_pool_v2(pool_of(), "kv")
    with pytest.raises(ValueError, match=name) as error:
        own.register_mem_host_pool_v2(pool_of(), name)
    message(error)


@pytest.mark.parametrize("call", ["get", "batch_get", "set", "batch_set"])
def test_bytes_of_no_shape_are_refused(path, tmp_path, call):
    with pytest.raises(NotImplementedError, match="interface_v1"):
        getattr(Storage(config(path, tmp_path)), call)("aa")
    with pytest.raises(ValueError, match="no host pool"):
        Storage(config(path, tmp_path)).batch_get_v1(["aa"], slots(0))
    with pytest.raises(ValueError, match="no host pool"):
        Storage(config(path, tmp_path)).exists("aa")
