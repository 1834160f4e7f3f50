"""Host memory for keys and values: pinned, or ordinary with a warning; one storage for both streams; none shared with copies."""

import copy
import warnings
from contextlib import contextmanager, nullcontext

import oracle
import pytest
import torch
from layer_walk import Tokens, feed, stored
from one_line import message
from tolerances import FLOAT32_FOLD
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.device.side_stream import SideStream
from calib.runtime.memory import tensors
from calib.runtime.paging import pinned_kv
from calib.runtime.paging.field import Field
from calib.runtime.paging.page_numbers import PAGE_TOKENS
from calib.runtime.paging.pinned_kv import PinnedKV, host_zeros
from calib.runtime.paging.pool import PagePool

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # a name alone needs no GPU
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """Without CUDA `torch.cuda.device` is replaced; the list has the devices that are current now."""
    entered: list[torch.device] = []
    if not torch.cuda.is_available():

        @contextmanager
        def current(device):
            entered.append(device)
            yield
            entered.pop()

        monkeypatch.setattr(torch.cuda, "device", current)
    return entered


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


# --- memory that cannot be pinned ---------------------------------------------------------------------------------------


def test_what_cannot_be_pinned_is_said_in_one_line(monkeypatch):
    def refused(shape, dtype):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(pinned_kv, "pinned_zeros", refused)
    with pytest.warns(UserWarning, match=r"\S") as caught:
        found = host_zeros((3, 2, 128, 64), torch.bfloat16, CUDA)
    assert found.device == CPU and found.shape == (3, 2, 128, 64) and found.dtype == torch.bfloat16
    assert not found.any() and not found.is_pinned()
    (warning,) = caught
    text = str(warning.message)
    assert "\n" not in text and len(text) < 400
    parts = ("98,304 bytes", "could not be pinned", "CUDA error: out of memory", "ordinary memory", "ulimit -l")
    assert all(part in text for part in (*parts, "smaller batch")), text
    assert "asynchronously" not in text


def test_what_another_gpu_had_before_is_not_copied_into_this_one(monkeypatch):
    """torch takes pinned memory for that of the GPU that it was pinned for, and copies it if it is requested for another."""
    monkeypatch.setattr(pinned_kv, "pinned_zeros", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(torch, "as_tensor", lambda pinned, device: torch.empty_like(pinned.host))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.warns(UserWarning, match="could not be pinned .it was pinned for another GPU than cuda"):
        assert host_zeros((3, 2, 128, 64), torch.bfloat16, CUDA).device == CPU


def test_where_no_device_needs_it_nothing_is_pinned(monkeypatch):
    monkeypatch.setattr(pinned_kv, "pinned_zeros", lambda shape, dtype: pytest.fail("pinned for a CPU"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in (CPU, torch.device("meta")):
            found = host_zeros((1, 2, 3, 4), torch.float16, device)
            assert found.device == CPU and found.shape == (1, 2, 3, 4) and not found.any()


def test_a_cache_whose_memory_cannot_be_pinned_goes_on(model, monkeypatch):
    """As if pinning failed on a GPU: the cache holds the same bits in ordinary memory."""
    tokens, found = Tokens.random(model, 300, seed=1), []
    for refused in (False, True):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if refused:
                real = host_zeros

                def of_a_gpu(shape, dtype, device, real=real):
                    return real(shape, dtype, CUDA) if all(shape) else torch.zeros(shape, dtype=dtype)

                patch.setattr(pinned_kv, "host_zeros", of_a_gpu)
                patch.setattr(pinned_kv, "pinned_zeros", no_memory)
            cache = compress(model, "specache", k=8, residual=32)
            cache.release()
            spans = [(0, 150), (150, 290), *((n, n + 1) for n in range(290, 300))]
            outputs = [feed(cache, [tokens[slice(*span)]]) for span in spans]
            found.append((outputs, stored(cache, 0)))
        assert bool([w for w in caught if "could not be pinned" in str(w.message)]) == refused
    (plain, bits), (other, same) = found
    for mine, theirs in zip(plain, other, strict=True):
        assert all(
            torch.equal(*pair) for layers in zip(mine, theirs, strict=True) for pair in zip(*layers, strict=True)
        )
    assert all(torch.equal(bits[name], same[name]) for name in bits)


def no_memory(shape, dtype):
    raise RuntimeError("cannot allocate")


def test_memory_is_pinned_for_the_device_that_reads_it(devices, monkeypatch):
    """That device is the current one while memory is pinned, because pinning makes a context on the current device."""
    seen = []
    monkeypatch.setattr(pinned_kv, "pinned_zeros", lambda *given: seen.append(list(devices)) or torch.zeros(1))
    monkeypatch.setattr(pinned_kv, "_seen_by_device", lambda host, device: host)
    host_zeros((1, 1, 1, 1), torch.float32, torch.device("cuda", 1))
    assert seen == [[torch.device("cuda", 1)]]


def test_pinned_memory_is_given_back_behind_what_reads_it_and_the_host_does_not_wait(monkeypatch):
    """One byte is copied on both streams: torch's allocator reuses pinned memory only after the copies that it knows of."""
    copied, at = [], [None]
    device, main, side = torch.device("cuda", 1), object(), object()

    @contextmanager
    def stream(which):
        at.append(which)
        yield
        at.pop()

    class Host(torch.Tensor):
        def to(self, where, non_blocking):
            assert (self.shape, self.dtype, non_blocking) == ((1,), torch.uint8, True)
            copied.append((where, at[-1]))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: pytest.fail("the host waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for streams, expected in (({}, [main]), ({device: side}, [main, side])):
        monkeypatch.setattr(SideStream, "_streams", streams)
        held = pinned_kv._Pinned(torch.zeros(3, 2, dtype=torch.float16).as_subclass(Host), device)
        assert not copied
        del held
        assert copied == [(device, one) for one in expected]
        copied.clear()


@pytest.mark.full
def test_pages_on_the_host_are_copied_a_few_times_in_all(model, monkeypatch):
    """64 pages, one after the other: as pools grow by a quarter, all allocations but the last have at most five times its pages."""
    cache, asked = compress(model, "offload"), []
    cache.release()
    monkeypatch.setattr(pinned_kv, "host_zeros", lambda *given: asked.append(given[0][0]) or host_zeros(*given))
    tokens = Tokens.random(model, 64 * PAGE_TOKENS, seed=1)
    for start in range(0, 64 * PAGE_TOKENS, PAGE_TOKENS):
        feed(cache, [tokens[start : start + PAGE_TOKENS]])
    own = asked[:: len(cache.compressed)]
    assert own[-1] >= 64 and sum(own[:-1]) <= 5 * own[-1]


# --- one storage for both streams -----------------------------------------------------------------------------------------


def pools(key_width: int = 6, value_width: int = 4) -> tuple[PinnedKV, dict[str, PagePool]]:
    """Both streams' pools of a layer with 2 KV heads."""
    pairs = PinnedKV(key_width, value_width)
    widths = {"keys": key_width, "values": value_width}
    made = {
        role: PagePool({"exact": Field(1, width, torch.float32, "exact")}, 2, CPU, memory=pairs.of(role))
        for role, width in widths.items()
    }
    return pairs, made


def views(pairs: PinnedKV, made: dict[str, PagePool]) -> None:
    """Asserts that a token's key and value lie side by side in one storage, which has nothing else."""
    keys, values = (made[role].tensors["exact"] for role in ("keys", "values"))
    assert len({part.untyped_storage().data_ptr() for part in (keys, values, pairs.pairs)}) == 1
    assert torch.equal(torch.cat([keys, values], -1), pairs.pairs)
    assert keys.shape[0] == values.shape[0] == made["keys"].capacity == made["values"].capacity
    assert pairs.pairs.untyped_storage().nbytes() == pairs.pairs.nbytes


@pytest.mark.parametrize("widths", [(6, 4), (4, 4), (4, 6)])
@pytest.mark.parametrize("order", [["keys", "values"], ["values", "keys"]])
def test_both_pools_grow_and_shrink_in_step(widths, order):
    pairs, made = pools(*widths)
    for capacity in (1, 2, 5):
        for role in order:
            made[role].grow(capacity)
        views(pairs, made)
        pairs.pairs[capacity - 1] = torch.randn(2, PAGE_TOKENS, sum(widths))
    before = pairs.pairs.clone()
    assert before[[0, 1, 4]].any(-1).all()  # earlier pages are kept when pools grow
    for role in order:
        made[role].copy([(4, 2)])
    assert torch.equal(pairs.pairs[2], before[4]) and torch.equal(pairs.pairs[[0, 1, 4]], before[[0, 1, 4]])
    for role in order:
        made[role].keep([4, 0])
    views(pairs, made)
    assert torch.equal(pairs.pairs, before[[4, 0]])
    for role in order:
        made[role].to(CPU)
    views(pairs, made)
    assert torch.equal(pairs.pairs, before[[4, 0]])
    for role in order:
        made[role].grow(3)
    views(pairs, made)
    assert torch.equal(pairs.pairs[:2], before[[4, 0]]) and not pairs.pairs[2].any()


def test_a_move_takes_new_memory_of_the_same_size():
    """A second `keep`, or a `to`, of as many pages must not give one pool what the other still reads."""
    pairs, made = pools()
    for role in made:
        made[role].grow(4)
    pairs.pairs[:] = torch.randn(pairs.pairs.shape)
    before = pairs.pairs.clone()
    for order in ([3, 2, 1, 0], [1, 0, 3, 2]):
        for role in made:
            made[role].keep(order)
        views(pairs, made)
        before = before[order]
        assert torch.equal(pairs.pairs, before)


@pytest.mark.parametrize("method", ["offload", "specache", "infllm"])
def test_a_layers_host_memory_is_one_tensor_of_whole_pages(model, method):
    """The pages that the tokens need, and at most a quarter more for growth, because a copy goes over the bus."""
    cache = compress(model, method)
    cache.release()
    tokens, at = Tokens.random(model, 2600, seed=2), 0
    for stop in (1, 128, 129, 2000, *range(2001, 2600, 61)):
        feed(cache, [tokens[at:stop]])
        at, pages = stop, -(-stop // PAGE_TOKENS)
        for layer in cache.compressed:
            (pairs,) = layer.store.on_host()
            assert pairs.shape[1:] == (2, PAGE_TOKENS, 2 * 32)
            assert pages <= pairs.shape[0] <= pages + max(1, pages // 4)
            assert pairs.untyped_storage().nbytes() == pairs.nbytes
        assert cache.memory().host_bytes == 2 * pairs.nbytes


# --- copies, reset and selection ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["offload", "specache", "infllm"])
def test_a_copy_has_host_memory_of_its_own(model, method):
    cache, tokens = compress(model, method), Tokens.random(model, 200, seed=3)
    cache.release()
    feed(cache, [tokens[:150]])
    branch, before = copy.deepcopy(cache), stored(cache, 0)
    for mine, other in zip(cache.compressed, branch.compressed, strict=True):
        (pairs,), (copied,) = mine.store.on_host(), other.store.on_host()
        assert pairs.data_ptr() != copied.data_ptr() and torch.equal(pairs, copied)
        for part in tensors(other.store):  # the streams of the copy see the copy
            assert part.untyped_storage().data_ptr() != pairs.untyped_storage().data_ptr()
    assert branch.memory() == cache.memory()
    feed(branch, [tokens[150:]])
    assert all(torch.equal(part, before[name]) for name, part in stored(cache, 0).items())
    feed(cache, [tokens[150:]])
    now = stored(cache, 0)
    assert all(torch.equal(part, now[name]) for name, part in stored(branch, 0).items())


def test_reset_and_selection_give_host_memory_back(model):
    cache = compress(model, "specache", residual=32)
    cache.release()
    feed(cache, [Tokens.random(model, 300, seed=row) for row in range(6)])
    full = cache.memory().host_bytes
    cache.batch_select_indices(torch.tensor([4]))
    assert cache.memory().host_bytes * 6 == full
    cache.reset()
    assert cache.memory().host_bytes == 0


# --- on a GPU -------------------------------------------------------------------------------------------------------------


@needs_cuda
def test_pinned_memory_is_read_and_written_by_the_device_in_position():
    found = host_zeros((3, 2, 4, 6), torch.float16, CUDA)
    assert found.device.type == "cuda" and not found.any()
    before = torch.cuda.memory_allocated()
    found[1] += 3
    assert torch.equal(found.cpu(), torch.tensor([0, 3, 0], dtype=torch.float16).view(3, 1, 1, 1).expand(3, 2, 4, 6))
    assert torch.cuda.memory_allocated() == before


@needs_cuda
def test_an_empty_piece_and_a_dead_owner():
    assert host_zeros((0, 2, 4, 6), torch.float16, CUDA).device.type == "cuda"
    view = host_zeros((3, 2, 4, 6), torch.float32, CUDA)[1]
    view.fill_(2)
    torch.cuda.synchronize()
    assert (view.cpu() == 2).all()


@needs_cuda
@pytest.mark.parametrize("method", ["offload", "specache", "infllm"])
def test_on_a_device_the_host_has_the_tokens_and_the_device_the_rest(method):
    model = random_model("llama").cuda()
    cache, tokens = compress(model, method), Tokens.random(model, 300, seed=4)
    cache.release()
    feed(cache, [tokens], devices=["cuda", "cuda"])
    for layer in cache.compressed:
        (pairs,) = layer.store.on_host()
        at = torch.tensor(cache.sequences.all_tables[-1].rows[0])
        held = pairs.cpu()[at].transpose(0, 1).flatten(1, 2)[:, :300]
        keys, values = held.split(32, -1)
        if method == "infllm":  # keys before RoPE
            keys = oracle.rotated(keys, model.model.rotary_emb.inv_freq.cpu(), torch.arange(300)[:, None])
        off = (keys - tokens.keys[layer.context.layer]).abs().max()
        assert off <= FLOAT32_FOLD * tokens.keys.abs().max() if method == "infllm" else off == 0
        assert torch.equal(values, tokens.values[layer.context.layer])


def test_the_warning_is_what_a_person_reads(monkeypatch):
    monkeypatch.setattr(pinned_kv, "pinned_zeros", no_memory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="pinned") as error:
            host_zeros((1, 1, 1, 1), torch.float32, CUDA)
    message(error)
