"""Chunks stored and loaded through LMCache's own objects: its allocator's memory, its serde processor, and its wrapper around a
file adapter."""

import select
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from one_line import message
from placed_chunks import placed

from calib.runtime import Artifact, ArtifactError, Codec
from calib.serve.lmcache.layout import Layout
from calib.serve.lmcache.options import Options

pytest.importorskip("lmcache.v1.distributed.serde", reason="lmcache is not installed (docs/serve/lmcache.md)")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.platform import consume_fd

from calib.serve.lmcache import plugin, serde
from calib.serve.lmcache.serde import CalibDeserializer, CalibSerializer, Chunks

pytestmark = pytest.mark.arithmetic

TOKENS, BITS, MODEL = 64, 3, "my-llama"
LAYERS, HEADS, D = 2, 2, 32
SHAPES = {
    "apart": ((2, LAYERS, TOKENS, HEADS * D), None),
    "packed": ((1, LAYERS, TOKENS, HEADS * 2 * D), None),
    "cpu": ((LAYERS, TOKENS, HEADS * 2 * D), 16),
}


def chunks_of(path, **options):
    return Chunks(Options.of({"artifact": path, "model": MODEL, "bits": BITS, "positions": 1024, **options}))


def key(number=0, model=MODEL, world=1, rank=0):
    return ObjectKey(number.to_bytes(4, "big"), model, ObjectKey.ComputeKVRank(world, rank, world, rank))


def memory(shape, dtype):
    """Memory from LMCache's allocator, filled with arbitrary bytes, as reused memory is."""
    found = AdHocMemoryAllocator(device="cpu").allocate([torch.Size(shape)], [dtype])
    found.raw_data.fill_(0x5A)
    found.parent_allocator = None  # Python frees it
    return found


def source(artifact, form, start, dtype=torch.float16, heads=range(HEADS), seed=0):
    """A chunk in LMCache's memory in the layout `form`, and the same in the codec's shape."""
    codec = Codec.from_artifact(artifact, bits=BITS, fixed_size=True)
    chunk = placed(artifact, codec, TOKENS, start, dtype, seed).unflatten(-1, (HEADS, D))[..., heads, :].flatten(3)
    shape, cpu_block = SHAPES[form]
    shape = (*shape[:-1], shape[-1] * len(heads) // HEADS)
    src = memory(shape, dtype)
    Layout.of([src.get_shape()], [dtype], LAYERS, D, cpu_block).write(src.tensor, chunk)
    return src, chunk


def room_for(chunks, src):
    """Memory for the blob of `src`, of the estimated size."""
    size = CalibSerializer(chunks).estimate_serialized_size(MemoryLayoutDesc(src.get_shapes(), src.get_dtypes()))
    return memory((size,), torch.uint8)


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("start", [0, 960])
def test_a_chunk_comes_back_as_the_codec_says(artifact, path, form, dtype, start):
    """The loaded chunk is the codec's decoded one, bit for bit, and the estimated size of the blob is exact."""
    chunks = chunks_of(path, cpu_block=SHAPES[form][1])
    src, chunk = source(artifact, form, start, dtype)
    blob = room_for(chunks, src)
    assert CalibSerializer(chunks).serialize(src, blob, key()) == blob.get_size() == len(blob.byte_array)
    dst = memory(src.get_shape(), dtype)
    CalibDeserializer(chunks).deserialize(blob, dst, key())
    codec = Codec.from_artifact(artifact, bits=BITS, fixed_size=True)
    wanted = codec.decode(codec.encode(chunk, start))
    layout = Layout.of([src.get_shape()], [dtype], LAYERS, D, SHAPES[form][1])
    assert torch.equal(layout.read(dst.tensor), wanted)
    assert not torch.equal(wanted, chunk)
    # The first tokens of a text are exact, so the start was found.
    assert torch.equal(wanted[:, :, :4], chunk[:, :, :4]) == (start == 0)


def test_ranks_have_blobs_of_one_size_and_of_their_own_heads(artifact, path):
    chunks, blobs = chunks_of(path), []
    for rank in range(2):
        src, chunk = source(artifact, "packed", 128, heads=range(rank, rank + 1))
        blob = room_for(chunks, src)
        assert CalibSerializer(chunks).serialize(src, blob, key(world=2, rank=rank)) == blob.get_size()
        dst = memory(src.get_shape(), torch.float16)
        CalibDeserializer(chunks).deserialize(blob, dst, key(world=2, rank=rank))
        codec = Codec.from_artifact(artifact, bits=BITS, heads=range(rank, rank + 1), fixed_size=True)
        assert not any(
            blob.byte_array.tobytes()[codec.size(TOKENS, dtype=torch.float16) :]
        )  # zeros, not what the memory held before
        layout = Layout.of([src.get_shape()], [torch.float16], LAYERS, D)
        assert torch.equal(layout.read(dst.tensor), codec.decode(codec.encode(chunk, 128)))
        with pytest.raises(ValueError, match=r"of the blob is|bytes, expected"):
            CalibDeserializer(chunks).deserialize(blob, dst, key(world=2, rank=1 - rank))
        blobs.append(blob)
    assert blobs[0].get_size() == blobs[1].get_size()


def stored(artifact, chunks, **options):
    src, _ = source(artifact, "packed", 64, **options)
    blob = room_for(chunks, src)
    CalibSerializer(chunks).serialize(src, blob, key())
    return src, blob


def test_what_is_no_blob_of_ours_is_a_miss_and_writes_nothing(artifact, path, tmp_path):
    """Blobs of another artifact or bit width, damaged ones, and LMCache's data without a serde."""
    chunks = chunks_of(path)
    src, blob = stored(artifact, chunks)
    tensors = dict(artifact.tensors)
    tensors["keys.klt.before.mean"] = tensors["keys.klt.before.mean"] + 1e-3
    Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits).save(tmp_path / "b.safetensors")
    others = {
        "artifact": chunks_of(str(tmp_path / "b.safetensors")),
        "bits": chunks_of(path, bits=3.5),
    }
    bad = {name: stored(artifact, other)[1].byte_array.tobytes() for name, other in others.items()}
    good = blob.byte_array.tobytes()
    bad |= {
        f"flipped bit of byte {at}": good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in (0, 40, 64, 200, 5000)
    }
    bad |= {
        "zeros": bytes(len(good)),
        "uncompressed": src.byte_array.tobytes()[: len(good)],
        "short": good[:-1] + b"\xff",
    }
    for name, data in bad.items():
        given = memory((len(data),), torch.uint8)
        given.raw_data[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dst = memory(src.get_shape(), torch.float16)
        before = dst.byte_array.tobytes()
        with pytest.raises(ValueError, match="blob") as error:
            CalibDeserializer(chunks).deserialize(given, dst, key())
        message(error)
        assert dst.byte_array.tobytes() == before, name
    CalibDeserializer(chunks).deserialize(blob, memory(src.get_shape(), torch.float16), key())


def test_a_blob_of_another_dtype_or_length_is_a_miss(artifact, path):
    chunks = chunks_of(path)
    _, blob = stored(artifact, chunks)
    for shape, dtype in (
        ((1, LAYERS, TOKENS, HEADS * 2 * D), torch.bfloat16),
        ((1, LAYERS, 32, HEADS * 2 * D), torch.float16),
    ):
        dst = memory(shape, dtype)
        before = dst.byte_array.tobytes()
        with pytest.raises(ValueError, match=r"out is|bytes, expected"):
            CalibDeserializer(chunks).deserialize(blob, dst, key())
        assert dst.byte_array.tobytes() == before


def test_chunks_that_are_not_for_it_are_refused_once_in_the_log(artifact, path, monkeypatch):
    said = list[str]()
    monkeypatch.setattr(serde.logger, "warning", lambda text, *words: said.append(text % words))
    chunks = chunks_of(path)
    src, _ = source(artifact, "packed", 64)
    for wanted, given, own in (
        ("of model other", src, key(model="other")),
        ("rank 1 of 2", src, key(world=2, rank=1)),
        ("no candidate fits", memory(src.get_shape(), torch.float16), key()),
        ("shape", memory((3, 4, 5), torch.float16), key()),
        ("torch.uint8", memory((1, LAYERS, TOKENS, HEADS * 2 * D), torch.uint8), key()),
    ):
        if wanted == "no candidate fits":
            given.tensor.copy_(50 * torch.randn(given.get_shape(), generator=torch.Generator().manual_seed(1)))
        for _ in range(3):
            with pytest.raises(ValueError, match=wanted) as error:
                CalibSerializer(chunks).serialize(given, room_for(chunks, given), own)
            message(error)
        assert sum(wanted in line for line in said) == 1, said
    # LMCache cannot handle an exception from the size estimate.
    assert room_for(chunks, memory((3, 4, 5), torch.float16)).get_size() == 1


def test_threads_share_it(artifact, path):
    """Eight threads use one `Chunks`, each with its own chunk; the codecs are made by whichever comes first."""
    chunks, wanted = chunks_of(path), {}
    codec = Codec.from_artifact(artifact, bits=BITS, fixed_size=True)
    begin = threading.Barrier(8)

    def turns(seed):
        src, chunk = source(artifact, "packed", 64 * seed, seed=seed)
        begin.wait()
        found = []
        for _ in range(5):
            blob, dst = room_for(chunks, src), memory(src.get_shape(), torch.float16)
            CalibSerializer(chunks).serialize(src, blob, key(seed))
            CalibDeserializer(chunks).deserialize(blob, dst, key(seed))
            found.append(Layout.of([src.get_shape()], [torch.float16], LAYERS, D).read(dst.tensor))
        wanted[seed] = codec.decode(codec.encode(chunk, 64 * seed))
        return found

    with ThreadPoolExecutor(8) as pool:
        for seed, found in enumerate(pool.map(turns, range(8))):
            assert all(torch.equal(one, wanted[seed]) for one in found)


def done(fd):
    """Wait until LMCache signals that a task has ended."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(30_000)
    consume_fd(fd)


@pytest.fixture
def store(path, tmp_path):
    """The plugin's file adapter with the registered serde, wrapped as in a server."""
    spec = {"module_path": plugin.__name__, "class_name": "FileAdapter", "adapter_params": {"base_path": str(tmp_path)}}
    adapter = create_l2_adapter_from_registry(PluginL2AdapterConfig.from_dict(spec))
    options = {"artifact": path, "model": MODEL, "bits": BITS, "positions": 1024}
    processor = create_serde_processor(SerdeConfig("calib", options))
    l1 = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")))
    wrapped = SerdeL2AdapterWrapper(adapter, processor, l1)
    yield wrapped
    wrapped.close()
    l1.close()


def loaded(store, dst):
    """Load the chunk into `dst`; return whether it was found."""
    task = store.submit_load_task([key()], [dst])
    done(store.get_load_event_fd())
    return store.query_load_result(task).test(0)


def test_files_hold_blobs_and_a_damaged_one_is_a_miss(artifact, store, tmp_path):
    src, chunk = source(artifact, "apart", 128)
    codec = Codec.from_artifact(artifact, bits=BITS, fixed_size=True)
    wanted = codec.decode(codec.encode(chunk, 128))
    task = store.submit_store_task([key()], [src])
    done(store.get_store_event_fd())
    assert store.pop_completed_store_tasks()[task].is_successful()
    (file,) = tmp_path.glob("*.data")
    data = file.read_bytes()
    assert len(data) == codec.size(TOKENS, dtype=torch.float16)
    for stored, found in ((data, True), (data[:-1] + bytes([data[-1] ^ 1]), False), (data[:-1], False), (b"", False)):
        file.write_bytes(stored)
        dst = memory(src.get_shape(), torch.float16)
        before = dst.tensor.clone()
        assert loaded(store, dst) is found
        assert torch.equal(dst.tensor, wanted if found else before)


def test_a_chunk_that_is_refused_is_not_stored(artifact, store, tmp_path):
    src = memory(SHAPES["apart"][0], torch.float16)
    src.tensor.copy_(50 * torch.randn(src.get_shape(), generator=torch.Generator().manual_seed(1)))
    for given in (src, memory((3, 4, 5), torch.float16)):
        task = store.submit_store_task([key()], [given])
        done(store.get_store_event_fd())
        assert not store.pop_completed_store_tasks()[task].is_successful()
    assert not list(tmp_path.glob("*.data"))


def test_a_server_with_wrong_options_does_not_start(path):
    for options, error, told in (
        ({"bits": 99}, ValueError, "bits must be a number from .* got 99"),
        ({"artifact": path + "?"}, ArtifactError, "no such file, expected an artifact"),
        ({"bit": 2}, ValueError, "serde calib has no field 'bit'"),
    ):
        with pytest.raises(error, match=told):
            create_serde_processor(SerdeConfig("calib", {"artifact": path, "model": MODEL, **options}))
