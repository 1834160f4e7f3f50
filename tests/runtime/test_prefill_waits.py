"""A layer's prefill does not wait for the device's whole queue: the device would then be idle until the host queued more work.

The host must know the extremes of a layer's first tokens, to choose float16 or float32 for parameters. It requests them before it
queues attention and reads them after that (`runtime/device/extremes.py`).
"""

import copy

import pytest
import torch
from host_waits import HostWaits

from benchmarks.gpu.inputs import tokens
from benchmarks.gpu.layers import Heads, bare_layers, forward
from benchmarks.gpu.prefill_launches import prefill_of
from calib.runtime.device.extremes import Extremes
from calib.runtime.device.row_index import row_index
from calib.runtime.ordered import stream
from calib.runtime.ordered.stream import Stream
from calib.runtime.stages.parameter_width import may_need_fp32
from calib.runtime.stages.to_device import tensors_of
from calib.runtime.tiered import store
from calib.runtime.tiered.store import TieredStore

HEADS, PROMPT, CPU = Heads(2, 4, 2, 64), 300, torch.device("cpu")

# By method how often a layer's extremes are read: once for each stream whose parameters may need more than 16 bits.
METHODS = {
    "kivi": 2,
    "rtn": 2,
    "zipcache": 2,
    "mikv": 2,
    "full": 0,
    "h2o": 0,
    "snapkv": 0,
    "streaming_llm": 0,
}
OPTIONS = {"rtn": {"bits": 4}}


def prompt(dtype: torch.dtype, factor: float = 1.0) -> list[torch.Tensor]:
    """Query, keys and values."""
    heads = (HEADS.heads, HEADS.kv_heads, HEADS.kv_heads)
    return [
        tokens(HEADS.rows, own, PROMPT, HEADS.head_dim, seed, CPU, dtype) * factor for seed, own in enumerate(heads)
    ]


def watched(monkeypatch, waits: HostWaits, reads: list[Extremes]) -> None:
    """Exempts from `waits` what the host computes from extremes, and attention's mass, which has another test; lists in `reads`
    each read of extremes."""

    def on_host(function):
        def unnoticed(*given, **options):
            with waits.on_host():
                return function(*given, **options)

        return unnoticed

    for owner in (Stream, TieredStore):
        monkeypatch.setattr(owner, "settle", on_host(owner.settle))
    for module in (stream, store):
        monkeypatch.setattr(module, "may_need_fp32", on_host(may_need_fp32))
    monkeypatch.setattr(store, "attention_mass", on_host(store.attention_mass))
    read = Extremes.read
    monkeypatch.setattr(Extremes, "read", lambda own: (reads.append(own), read(own))[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_prefill_does_not_wait(method, dtype, monkeypatch):
    """The second layer is watched, since the first computes what all layers share. Float16 tokens need no extremes."""
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    layers, reads = bare_layers(method, HEADS, 2, **OPTIONS.get(method, {})), []
    forward(layers[0], *prompt(dtype))
    waits = HostWaits()
    watched(monkeypatch, waits, reads)
    with waits:
        forward(layers[1], *prompt(dtype))
    assert not waits.names
    assert len(reads) == (METHODS[method] if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("method", ["kivi", "zipcache", "mikv"])
def test_neither_does_one_with_kernels(method, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    noted = prefill_of(method, {}, HEADS, PROMPT)
    assert noted.waits == 0 and noted.reads == METHODS[method]


@pytest.mark.parametrize("method", ["kivi", "rtn", "zipcache", "mikv"])
def test_attention_is_queued_before_extremes_are_read(method, monkeypatch):
    order, attention, read = [], torch.nn.functional.scaled_dot_product_attention, Extremes.read
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **options: (order.append("attention"), attention(*given, **options))[1],
    )
    monkeypatch.setattr(Extremes, "read", lambda own: (order.append("read"), read(own))[1])
    forward(bare_layers(method, HEADS, 1, **OPTIONS.get(method, {}))[0], *prompt(torch.bfloat16))
    assert order[0] == "attention" and set(order[1:]) == {"read"}


@pytest.mark.parametrize("factor", [1.0, 1e5, 1e12], ids="{:g}".format)
@pytest.mark.parametrize("method", ["kivi", "rtn", "zipcache", "mikv"])
def test_parameters_are_as_wide_as_the_tokens_ask_for(method, factor, monkeypatch):
    """The store chooses the parameters' dtype as a codec does for the same tokens, and existing pages are converted to it."""
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    query, keys, values = prompt(torch.bfloat16, factor)
    layer = bare_layers(method, HEADS, 1, **OPTIONS.get(method, {}))[0]
    forward(layer, query / factor, keys, values)
    given = {"keys": keys, "values": values}
    if isinstance(layer.store, TieredStore):
        for tier in layer.store.tiers:
            for role, stages in tier.plan.streams():
                assert tier.fp32_params[role] is stages.codec.fp32_params(given[role])
        for (role, _), transform in layer.store.transforms.items():
            wide = bool(given[role].abs().max() > torch.finfo(torch.float16).max)
            assert transform.measured is None or (transform.dtype == torch.float32) is wide
        pools = [tier.pool for tier in layer.store.tiers]
    else:
        for own in layer.store.streams:
            assert own.fp32_params is own.plan.codec.fp32_params(given[own.role])
        pools = [own.pool for own in layer.store.streams]
    for pool in pools:
        assert {name: field.dtype for name, field in pool.fields.items()} == {
            name: tensor.dtype for name, tensor in pool.tensors.items()
        }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_extremes(dtype):
    x = torch.randn(2, 3, 5, 7, dtype=dtype) * 1e3
    own = Extremes(x)
    copied = copy.deepcopy(own)
    for extremes in (own, own, copied):
        found = extremes.read()
        assert found.dtype == dtype and found.shape == (1, 1, 2, 1)
        assert torch.equal(found.flatten(), torch.stack(x.aminmax()))
    assert not Extremes(x.to("meta")).read().any()


def test_extremes_of_what_is_transposed_are_found_without_a_copy(monkeypatch):
    """A model's values are transposed, of which torch.aminmax would make a copy first."""
    x = torch.randn(2, 5, 3, 7).transpose(1, 2)
    aminmax, lying = torch.aminmax, []
    monkeypatch.setattr(torch, "aminmax", lambda own, **into: (lying.append(own.is_contiguous()), aminmax(own, **into)))
    assert torch.equal(Extremes(x).read().flatten(), torch.stack([x.min(), x.max()])) and lying == [True]


def test_extremes_by_channel_are_of_the_same_tokens_alone(monkeypatch):
    """None for a part of the tokens, for other tokens, and after the tensor was freed; `read` is the same as without channels."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    x = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    own = Extremes(x, by_channel=True)
    assert torch.equal(own.read().flatten(), torch.stack(x.aminmax()))
    found = own.of_channels(x[:, :, :])
    assert found is not None and torch.equal(found.amax(2)[:, :, 1], x.amax(2).float())
    assert own.of_channels(x[:, :, :39]) is own.of_channels(x[:1]) is own.of_channels(x.clone()) is None
    assert Extremes(x).of_channels(x) is None
    other = x.clone()
    del x
    assert own.of_channels(other) is None


@pytest.mark.full
@pytest.mark.parametrize("method", ["zipcache", "mikv"])
def test_a_layer_reads_what_it_measures_once(method, monkeypatch):
    """Statistics of a whole prompt are computed from the extremes that were requested before attention, with the same bits."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    heads, known = Heads(1, 2, 1, 32), []
    given = [tokens(1, own, 130, 32, seed, CPU, torch.bfloat16) for seed, own in enumerate((2, 1, 1))]
    of_channels = Extremes.of_channels
    monkeypatch.setattr(
        Extremes, "of_channels", lambda own, tokens: (known.append(of_channels(own, tokens)), known[-1])[1]
    )
    one, other = (bare_layers(method, heads, 1)[0] for _ in range(2))
    forward(one, *given)
    assert any(part is not None for part in known)
    monkeypatch.setattr(Extremes, "of_channels", lambda own, tokens: None)
    forward(other, *given)
    for mine, plain in zip(one.store.transforms.values(), other.store.transforms.values(), strict=True):
        assert all(map(torch.equal, tensors_of(mine.stage), tensors_of(plain.stage)))


def test_rows_as_an_index():
    x = torch.arange(6)
    for rows in ([2], [1, 2, 3], [0, 1, 2, 3, 4, 5], [3, 1], [0, 2]):
        assert x[row_index(rows, CPU)].tolist() == rows
    assert isinstance(row_index([1, 2, 3], CPU), slice) and not isinstance(row_index([0, 2], CPU), slice)
