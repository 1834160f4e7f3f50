"""The sample of vectors: which vectors it holds, and that samples of a corpus's parts merge into that of the whole."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_layer_sample import SHAPE, rows_of, sample
from transformers import Phi3Config, Phi3ForCausalLM

from calib.capture.capture import stream
from calib.capture.reservoir import priorities
from calib.capture.shape import Shape
from calib.runtime.rotation import Rotation
from calib.statistics.vector_samples import VectorSamples

SEED = 5


def no_rotation() -> Rotation:
    raise AssertionError("keys before RoPE are there: nothing is to be unrotated")


def samples(capacity: int, dtype: torch.dtype = torch.float32, shape: Shape = SHAPE) -> VectorSamples:
    return VectorSamples(shape, SEED, capacity, dtype, no_rotation)


def seen(seed: int = 0, **options):
    """A sample whose keys before RoPE are others than those after it."""
    one = sample(seed=seed, **options)
    return replace(one, keys_before_rope=one.keys + 100)


@pytest.mark.parametrize("capacity", [7, 10_000])
@pytest.mark.parametrize("padding", [(), (0, 30)])
def test_the_vectors_are_heads_of_the_tokens_of_least_priority(capacity, padding):
    one, kept = seen(padding=padding), samples(capacity)
    kept.observe(one)
    expected = []
    for row in range(2):
        for token in range(64):
            for head in range(2) if one.mask[row, token] else ():
                number = one.index[row, token] * 2 + head
                vectors = (one.keys_before_rope[row, head, token], one.values[row, head, token])
                expected.append((int(priorities(SEED, number)), *vectors))
    expected = sorted(expected, key=lambda entry: entry[0])[:capacity]
    found = kept.vectors(0)
    assert torch.equal(found["keys"], torch.stack([keys for _, keys, _ in expected]))
    assert torch.equal(found["values"], torch.stack([values for _, _, values in expected]))
    assert kept.tensors() == {}


def test_every_layer_keeps_the_same_vectors_and_one_that_nothing_reached_none():
    kept = samples(50, shape=Shape(4, 4, 2, 32))
    for layer in (0, 1, 3):
        kept.observe(replace(seen(), layer=layer))
    assert kept.reached() == [0, 1, 3]
    assert torch.equal(kept.vectors(1)["keys"], kept.vectors(3)["keys"])
    assert len(kept.vectors(0)["keys"]) == 50
    assert kept.vectors(2)["keys"].shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_give_the_sample_of_the_whole_and_a_16_bit_model_loses_nothing(dtype):
    one = seen(padding=(0, 5))
    one = replace(one, **{name: getattr(one, name).to(dtype) for name in ("keys_before_rope", "values", "keys")})
    whole, first, second = (samples(40, dtype) for _ in range(3))
    whole.observe(one)
    for kept, row in ((first, slice(0, 1)), (second, slice(1, 2))):
        part = replace(rows_of(one, row), keys_before_rope=one.keys_before_rope[row])
        for half in (slice(0, 40), slice(40, 64)):
            short = replace(rows_of(part, slice(None), half), keys_before_rope=part.keys_before_rope[:, :, half])
            kept.observe(short)
    second.merge(first)
    for name, x in whole.vectors(0).items():
        assert torch.equal(second.vectors(0)[name], x)
        assert x.dtype == torch.float32
    assert whole.layers[0].rows.dtype == dtype
    everything = one.keys_before_rope.transpose(1, 2)[one.mask].flatten(0, 1).float()
    assert all((everything == row).all(1).any() for row in whole.vectors(0)["keys"])


def test_a_checkpoint_half_way_goes_on():
    whole, first, second = (samples(40) for _ in range(3))
    whole.observe(seen(0))
    whole.observe(seen(1))
    first.observe(seen(0))
    second.load_state_dict(first.state_dict())
    second.observe(seen(1))
    assert torch.equal(second.vectors(0)["keys"], whole.vectors(0)["keys"])


def test_keys_of_a_fused_projection_are_turned_back():
    """Phi-3 computes queries, keys and values in one product: its keys before RoPE are that product's middle part."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    kept = VectorSamples(Shape.of(model), SEED, 10_000, torch.float32, lambda: Rotation.of(model, "no remedy"))
    before = []
    for layer in model.model.layers:
        layer.self_attn.qkv_proj.register_forward_hook(lambda module, args, output: before.append(output))
    tokens = torch.randint(1, 64, (2, 120), generator=torch.Generator().manual_seed(1))
    index = torch.arange(240).view(2, 120)
    stream(model, tokens, torch.ones_like(tokens, dtype=torch.bool), index, kept.observe)
    order = priorities(SEED, torch.arange(480)).argsort()
    for layer, product in enumerate(before):
        keys = product[..., 64:96].reshape(480, 16)
        torch.testing.assert_close(kept.vectors(layer)["keys"], keys[order], rtol=1e-4, atol=1e-4)
        assert (kept.vectors(layer)["values"] - product[..., 96:].reshape(480, 16)[order]).abs().max() == 0


WORLD = """
import sys, torch
from dataclasses import replace
from torch import distributed
sys.path.insert(0, sys.argv[3])
from toy_layer_sample import SHAPE, sample
from calib.statistics.vector_samples import VectorSamples

rank, file = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    def kept(seeds):
        found = VectorSamples(SHAPE, 5, 60, dtype, lambda: None)
        for seed in seeds:
            one = sample(seed=seed)
            found.observe(replace(one, keys_before_rope=one.keys.to(dtype), values=one.values.to(dtype)))
        return found
    mine, whole = kept([rank] if rank else [rank, 2]), kept([0, 1, 2])
    mine.synchronise(torch.device("cpu"))
    for name, x in whole.vectors(0).items():
        assert torch.equal(mine.vectors(0)[name], x), (rank, dtype, name)
    assert mine.reached() == [0]
distributed.destroy_process_group()  # left to the exit, a thread of gloo's now and then ends the process first
print("the same")
"""


@pytest.mark.full
def test_two_processes_hold_the_sample_of_the_whole(tmp_path):
    arguments = [str(tmp_path / "rendezvous"), str(Path(__file__).parents[1] / "support")]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WORLD, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in running:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "the same\n"), err[-2000:]
