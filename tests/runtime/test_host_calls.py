"""The host's work in a decode step, counted and not timed: calls of calib's functions, launches and copies of numbers."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import eager_host
from benchmarks.bases import made_up
from calib.runtime import compress
from calib.runtime.attention import attention
from calib.runtime.device import graph_inputs
from calib.runtime.graphs import step_graphs

FOLDERS = tuple(str((Path(__file__).parents[2] / name).resolve()) for name in ("runtime", "kernels"))
ROWS, PROMPT = 3, 140

# Calls of calib's functions in a layer after the first, in a step that encodes no block.
MOST = {"kivi": 20, "rtn": 20, "klt": 59, "zipcache": 27}
OPTIONS = {
    "kivi": {"bits": 2, "residual": 128},
    "rtn": {"bits": 4},
    "klt": {"bits": 2.0, "predict": True},
    "zipcache": {},
}

# The same in a whole replayed step, however many layers there are.
MOST_REPLAYED = {"kivi": 115, "rtn": 106, "zipcache": 68, "gear": 60, "mikv": 83, "h2o": 63}


def own_calls(work) -> int:
    """The number of calls of functions of `runtime` and `kernels` in `work()`."""
    found = Counter()

    def seen(frame, event, argument):
        if event == "call" and str(Path(frame.f_code.co_filename).resolve()).startswith(FOLDERS):
            found[frame.f_code.co_name] += 1

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found.total()


@pytest.mark.arithmetic
@pytest.mark.parametrize("method", MOST)
def test_a_layer_of_an_eager_step_calls_little(method, monkeypatch):
    """Kernels are counted and not launched. The first layer is left out, because it computes what all layers share."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    model = eager_host.model_of(3)
    modules = [layer.self_attn for layer in model.model.layers]
    artifact, least = made_up(model, sized=True) if method == "klt" else None, []
    with (
        torch.no_grad(),
        eager_host.counted_launches() as launches,
        compress(model, method, artifact, **OPTIONS[method]) as cache,
    ):
        for step in range(6):
            width = 1 if step else PROMPT
            query, keys = (eager_host.drawn(ROWS, heads, width) for heads in (eager_host.HEADS, eager_host.KV_HEADS))
            launches.clear()
            of_layers = []
            for number, module in enumerate(modules):
                held = cache.update(keys, keys, number)
                work = partial(attention, module, query, *held, None, scaling=0.125)
                of_layers.append(own_calls(work) if step > 1 else work())  # counting a prompt's calls takes minutes
            if step:
                assert launches["put"] == len(modules)
            if step > 1:
                least.append(min(of_layers[1:]))
    assert min(least) <= MOST[method]


class Nothing:
    """Stands for a CUDA graph: `result` is that of the recorded step, and replays do nothing."""

    def __init__(self, step):
        self.result = step()

    def replay(self):
        """No launch."""


def replayed_calls(method: str, layers: int) -> set[int]:
    """The numbers of calls in the replayed steps."""
    model, found = eager_host.model_of(layers), set()
    ids, token = torch.ones(ROWS, PROMPT, dtype=torch.int64), torch.ones(ROWS, 1, dtype=torch.int64)
    with torch.no_grad(), compress(model, method, graphs=True, **OPTIONS.get(method, {})) as cache:
        model(input_ids=ids, past_key_values=cache)
        for step in range(12):
            replays = cache.graphs.replays
            calls = own_calls(lambda: model(input_ids=token, past_key_values=cache))
            if step > 4 and cache.graphs.replays > replays:
                found.add(calls)
    return found


@pytest.mark.parametrize("method", MOST_REPLAYED)
def test_a_replay_works_numbers_out_once_for_all_layers(method, monkeypatch):
    """As many calls with two layers as with four, and one copy for all numbers."""
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    monkeypatch.setattr(step_graphs, "recorder", lambda device: Nothing)
    fed = []
    feed = graph_inputs.GraphInputs.feed
    monkeypatch.setattr(
        graph_inputs.GraphInputs,
        "feed",
        lambda inputs, step: (fed.append(len(inputs._stretches)), feed(inputs, step))[1],
    )
    of_two, of_four = replayed_calls(method, 2), replayed_calls(method, 4)
    assert of_two == of_four and max(of_two) <= MOST_REPLAYED[method]
    assert set(fed) == {1}


def test_numbers_of_several_types_are_one_copy():
    """Each input is aligned as a tensor of its own would be, and `feed` overwrites all with a later step's numbers."""
    inputs, cpu = graph_inputs.GraphInputs[int](), torch.device("cpu")
    asked = {
        ("slots", torch.int64): lambda step: [step, -step, 2**40 + step],
        ("pages", torch.int32): lambda step: [7 * step] * 11,
        ("nothing", torch.int64): lambda step: [],
        ("probes", torch.int64): lambda step: [step % 2 == 0, True],
    }

    def tensors(step):
        return [inputs.tensor(name, numbers, dtype, cpu, step) for (name, dtype), numbers in asked.items()]

    tensors(1)
    inputs.settle()
    settled = tensors(2)
    assert len({tensor.untyped_storage().data_ptr() for tensor in settled}) == 1
    for step in (2, 3):
        inputs.feed(step)
        for tensor, ((_, dtype), numbers) in zip(settled, asked.items(), strict=True):
            assert torch.equal(tensor, torch.tensor(numbers(step), dtype=dtype))
            assert tensor.storage_offset() * tensor.element_size() % graph_inputs.ALIGNED == 0
    with pytest.raises(graph_inputs.NotRecordableError, match="the step needs the input 'lengths'"):
        inputs.tensor("lengths", lambda step: [step], torch.int64, cpu, 3)
