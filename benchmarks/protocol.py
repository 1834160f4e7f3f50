"""What every benchmark here does the same way: models by name, quartiles, and the header of a run's file."""

import json
import platform
import statistics
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> PreTrainedModel:
    """The embedded model, another folder, or `wide`: random weights with the KV shape of an 8B model, 2 layers."""
    if name != "wide":
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=65536)).eval()


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(value, 3) for value in statistics.quantiles(values, n=4)]


def keep(name: str, content: dict[str, object]) -> None:
    """Writes a run to `results/NAME`, with the versions it ran on."""
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    RESULTS.mkdir(exist_ok=True)
    run = {"threads": torch.get_num_threads(), "versions": versions, **content}
    (RESULTS / name).write_text(json.dumps(run, indent=1) + "\n")
