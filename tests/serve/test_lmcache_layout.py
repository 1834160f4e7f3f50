"""Layouts of LMCache's memory: every element is read from and written to its location, and other shapes and dtypes are refused."""

import pytest
import torch
from one_line import message

from calib.serve.lmcache.layout import Layout

LAYERS, TOKENS, HEADS, D = 3, 8, 2, 4
SPLIT = (2, LAYERS, TOKENS, HEADS * D)
PACKED = (1, LAYERS, TOKENS, HEADS * 2 * D)


def layout(shape, cpu_block=None, dtype=torch.float32):
    return Layout.of([torch.Size(shape)], [dtype], LAYERS, D, cpu_block)


def numbered(stream, layer, token, head, channel):
    """A number that is different for each element."""
    return float((((stream * LAYERS + layer) * TOKENS + token) * HEADS + head) * D + channel)


def everywhere():
    return [
        (stream, layer, token, head, channel)
        for stream in range(2)
        for layer in range(LAYERS)
        for token in range(TOKENS)
        for head in range(HEADS)
        for channel in range(D)
    ]


def filled(shape, place):
    """A tensor of this shape, with each element's number at the index `place` of that element in an engine's layout."""
    tensor = torch.full(shape, float("nan"))
    for entry in everywhere():
        tensor[place(*entry)] = numbered(*entry)
    return tensor


def apart(stream, layer, token, head, channel):
    return stream, layer, token, head * D + channel


def packed(stream, layer, token, head, channel):
    return 0, layer, token, head * 2 * D + stream * D + channel


def of_a_cpu(block):
    """vLLM's layout on a CPU: for a block and head, keys [D, block], then values [block, D]. LMCache views the same memory as
    `block` rows of 2 D."""

    def place(stream, layer, token, head, channel):
        first, within = divmod(token, block)
        at = stream * block * D + (within * D + channel if stream else channel * block + within)
        row, column = divmod(at, 2 * D)
        return 0, layer, first * block + row, head * 2 * D + column

    return place


@pytest.mark.parametrize(
    ("shape", "cpu_block", "place"),
    [
        (SPLIT, None, apart),
        (SPLIT, 4, apart),
        (PACKED, None, packed),
        (PACKED, 4, of_a_cpu(4)),
        (PACKED, 8, of_a_cpu(8)),
        (PACKED, 2, of_a_cpu(2)),
    ],
)
def test_every_entry_goes_where_it_belongs_and_back(shape, cpu_block, place):
    tensor, wanted = filled(shape, place), filled(SPLIT, apart)
    assert not tensor.isnan().any()
    one = layout(shape, cpu_block)
    assert (one.tokens, one.heads) == (TOKENS, HEADS)
    assert torch.equal(one.read(tensor), wanted)
    back = torch.full(shape, float("nan"))
    one.write(back, wanted)
    assert torch.equal(back, tensor)


def test_three_axes_are_packed_as_well():
    tensor = filled(PACKED, packed)
    assert torch.equal(layout(PACKED[1:]).read(tensor[0]), filled(SPLIT, apart))


def test_keys_and_values_apart_are_not_copied():
    tensor = torch.zeros(SPLIT)
    assert layout(SPLIT).read(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "shape",
    [
        (TOKENS,),
        (LAYERS, TOKENS),
        (3, *SPLIT[1:]),
        (2, LAYERS + 1, TOKENS, HEADS * D),
        (2, LAYERS, TOKENS, HEADS * D + 1),
        (1, LAYERS, TOKENS, HEADS * 2 * D + D),
        (LAYERS, TOKENS, D),
        (2, LAYERS, 0, HEADS * D),
        (2, LAYERS, TOKENS, 0),
        (1, *SPLIT),
    ],
    ids=str,
)
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="shape") as error:
        layout(shape)
    assert str(list(shape)) in message(error)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float64], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")) as error:
        layout(SPLIT, dtype=dtype)
    message(error)


def test_several_tensors_and_half_blocks_are_refused():
    with pytest.raises(ValueError, match="2 tensors") as error:
        Layout.of([torch.Size(SPLIT)] * 2, [torch.float32] * 2, LAYERS, D)
    message(error)
    with pytest.raises(ValueError, match="multiple of cpu_block=3") as error:
        layout(PACKED, cpu_block=3)
    message(error)
