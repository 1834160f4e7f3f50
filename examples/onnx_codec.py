"""A model's keys and values through ONNX graphs: packed and attended in onnxruntime, beside exact attention.

python examples/onnx_codec.py                                                        # rtn at 4 bits, ranges of the prompt
python examples/onnx_codec.py --artifact my.calib.safetensors --method kivi --bits 2
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from calib.cli import main as calib

PROMPT = "line river: 4821\nline candle: 9034\n" * 8


def layer_of(model_name: str, text: str, layer: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A layer's keys and values `[1, kv_heads, tokens, head_dim]` after whole groups of 32 tokens, and its query heads."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")
    ids = AutoTokenizer.from_pretrained(model_name)(text, return_tensors="pt").input_ids
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, : ids.shape[1] // 32 * 32], past_key_values=cache)
    held = cache.layers[layer]
    return held.keys.numpy(), held.values.numpy(), model.config.num_attention_heads


def exact(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention as the papers write it."""
    keys, values = (np.repeat(part, query.shape[1] // part.shape[1], 1) for part in (keys, values))
    scores = query @ keys.swapaxes(2, 3) / np.sqrt(keys.shape[3])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


def run(folder: Path, layer: int, name: str, **given: np.ndarray) -> dict[str, np.ndarray]:
    """One graph on these inputs: onnxruntime and numpy alone."""
    session = onnxruntime.InferenceSession(
        str(folder / f"layer{layer}.{name}.onnx"), providers=["CPUExecutionProvider"]
    )
    return dict(zip([found.name for found in session.get_outputs()], session.run(None, given), strict=True))


def through_graphs(
    graph: Callable[..., dict[str, np.ndarray]], query: np.ndarray, **streams: np.ndarray
) -> tuple[np.ndarray, int]:
    """Attention over packed keys and values, and their bytes; nothing is left exact in a window."""
    given = {"mask": np.ones((1, 1, streams["keys"].shape[2]), bool)}
    size = 0
    for stream, tokens in streams.items():
        packed = graph(f"{stream}.encode", **{stream: tokens})
        given |= {f"{stream}.{name}": part for name, part in packed.items()} | {f"{stream}.window": tokens[:, :, :0]}
        size += sum(part.nbytes for part in packed.values())
    return graph("attend", query=query, **given)["output"], size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="artifacts/tiny-llama", help="a folder or a hub name")
    parser.add_argument("--artifact", help="what `calib fit` wrote, a file or a hub name")
    parser.add_argument(
        "--method", default="rtn", help="rtn or kivi, whose graphs take nothing that is measured beside them"
    )
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--prompt", default=PROMPT)
    asked = parser.parse_args()

    keys, values, heads = layer_of(asked.model, asked.prompt, asked.layer)
    query = np.random.default_rng(0).standard_normal((1, heads, 1, keys.shape[3]), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        source = ["--artifact", asked.artifact] if asked.artifact else ["--model", asked.model]
        method = ["--method", asked.method, "--bits", str(asked.bits), "--layer", str(asked.layer)]
        if calib(["export", "--format", "onnx", *source, *method, "--output", folder]):
            raise SystemExit(1)
        found, size = through_graphs(partial(run, Path(folder), asked.layer), query, keys=keys, values=values)
    lost = np.linalg.norm(found - exact(query, keys, values)) / np.linalg.norm(exact(query, keys, values))
    print(f"{keys.shape[2]} tokens of layer {asked.layer}: {size:,} bytes packed, {4 * keys.size:,} in 16 bits")
    print(f"attention differs by {lost:.4f} of its norm from exact attention")


if __name__ == "__main__":
    main()
