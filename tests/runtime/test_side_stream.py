"""Work on the side stream: torch's allocator knows all memory that it uses, to reuse none early, and copies of a cache wait for it.

On a CPU such work runs at once; the operations that a GPU would run on the side stream are watched here.
"""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from layer_walk import Tokens, feed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.device.side_stream import SideStream
from calib.runtime.paging import pinned_kv

METHODS = {
    "specache": {"k": 8, "residual": 32},
    "infllm": {"initial": 4, "window": 32, "block": 8, "representatives": 2, "fetched": 3},
}


def storages(*parts: object) -> dict[int, str]:
    """The storage addresses of the tensors among `parts`, each with dtype and shape."""
    found = [part for part in tree_leaves(parts) if isinstance(part, torch.Tensor) and part.numel()]
    return {part.untyped_storage().data_ptr(): f"{part.dtype} {tuple(part.shape)}" for part in found}


class Beside(TorchDispatchMode):
    """Of work on the side stream `used` is memory operations were given and did not make, `known` what `work` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.beside, self.known = False, set[int]()
        self.made, self.used = dict[int, str](), dict[int, str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # a tensor of numbers of the host, made here
            self.made |= storages(args)
        if self.beside:
            self.used |= {at: told for at, told in storages(args, kwargs).items() if at not in self.made}
            self.made |= {at: told for at, told in storages(answer).items() if at not in self.used}
        return answer

    @contextmanager
    def work(self, stream: SideStream, *used: torch.Tensor):
        """Replaces `SideStream.work`."""
        self.known |= storages(used).keys()
        self.beside = True
        yield
        self.beside = False


@pytest.mark.parametrize(("method", "options"), METHODS.items(), ids=list(METHODS))
def test_the_allocator_is_told_of_all_memory_that_is_used_beside(method, options, monkeypatch):
    """Except pages in host memory, which wait for both streams when they are freed (`test_host_memory.py`)."""
    model, watched, forwards = random_model("llama"), Beside(), 0
    monkeypatch.setattr(SideStream, "work", lambda stream, *used: watched.work(stream, *used))
    with compress(model, method, **options) as cache, watched:
        for lengths in ((200, 150), (1, 1), (1, 1), (3, 3)):
            watched.known, watched.made, watched.used = set(), {}, {}
            feed(cache, [Tokens.random(model, length, seed=length + row) for row, length in enumerate(lengths)])
            pages = storages([layer.store.on_host() for layer in cache.compressed])
            unknown = {at: told for at, told in watched.used.items() if at not in watched.known | pages.keys()}
            assert not unknown
            forwards += bool(watched.used)
    assert forwards


@pytest.mark.parametrize(("method", "options"), [*METHODS.items(), ("offload", {})], ids=[*METHODS, "offload"])
def test_a_copy_waits_and_has_its_pages_in_host_memory(method, options, monkeypatch):
    model, events = random_model("llama"), []
    with compress(model, method, **options) as cache:
        feed(cache, [Tokens.random(model, length, seed=length) for length in (200, 150)])
        wait, zeros = SideStream.wait, pinned_kv.host_zeros
        monkeypatch.setattr(SideStream, "wait", lambda stream: (events.append("waits"), wait(stream))[1])
        monkeypatch.setattr(pinned_kv, "host_zeros", lambda *given: (events.append("host memory"), zeros(*given))[1])
        other = copy.deepcopy(cache)
        assert events[:2] == (["host memory"] * 2 if method == "offload" else ["waits", "host memory"])
        for layer, copied in zip(cache.compressed, other.compressed, strict=True):
            for one, same in zip(layer.store.on_host(), copied.store.on_host(), strict=True):
                assert torch.equal(one, same) and not storages(one).keys() & storages(same).keys()
            host = getattr(copied.store, "host", copied.store)
            pools = [stream.pool for stream in host.streams]
            held = storages([pool.tensors for pool in pools])
            assert held.keys() == storages(copied.store.on_host()).keys()


def test_work_that_fails_is_waited_for_as_well(monkeypatch):
    """What it has queued before still writes to the tensors: their memory must not be given away before that is done."""
    recorded, events = [], []

    class Stream:
        def wait_stream(self, other):
            """Does nothing."""

    class Event:
        def record(self, stream):
            events.append(stream)

    class Used:
        def record_stream(self, stream):
            recorded.append(stream)

    stream, device = Stream(), torch.device("cuda", 0)
    monkeypatch.setattr(SideStream, "_streams", {device: stream})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    side = SideStream(device)
    with pytest.raises(ZeroDivisionError), side.work(Used(), Used()):
        raise ZeroDivisionError
    assert recorded == [stream] * 2 and events == [stream] and side._done is not None
