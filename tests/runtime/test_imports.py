"""What importing the runtime loads: torch, safetensors and transformers, and nothing that only fitting needs."""

import subprocess
import sys

import pytest

ABOVE = {"lightning", "datasets", "wandb", "onnx", "onnxruntime", "matplotlib", "jsonargparse"}


def modules_after(statements: str) -> list[str]:
    """Names of all modules that a fresh interpreter has loaded after `statements`."""
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def floors(modules: list[str]) -> set[str]:
    """The subpackages of calib among `modules`."""
    return {name.split(".")[1] for name in modules if name.startswith("calib.")}


@pytest.mark.full
def test_the_runtime_loads_nothing_of_the_fit():
    loaded = modules_after("import calib.runtime")
    assert {"torch", "transformers", "safetensors"} <= set(loaded)
    assert not ABOVE & set(loaded)
    assert floors(loaded) == {"runtime", "kernels"}


@pytest.mark.full
def test_generating_through_a_cache_loads_nothing_of_the_fit():
    loaded = modules_after(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from calib.runtime import compress\n"
        "config = LlamaConfig(vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=1,"
        " num_attention_heads=2, num_key_value_heads=1, head_dim=32)\n"
        "model = LlamaForCausalLM(config)\n"
        "with compress(model, method='kivi') as cache:\n"
        "    model.generate(torch.ones(1, 4, dtype=torch.long), past_key_values=cache, max_new_tokens=3)\n"
    )
    assert not ABOVE & set(loaded)
    assert floors(loaded) == {"runtime", "kernels"}


@pytest.mark.full
def test_kernels_stand_on_torch_alone():
    loaded = modules_after("import calib.kernels.attend.reference, calib.kernels.quantise.reference")
    assert not {*ABOVE, "transformers", "safetensors"} & set(loaded)
    assert floors(loaded) == {"kernels"}
