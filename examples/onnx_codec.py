"""A model's keys and values through ONNX graphs: packed, unpacked and attended in onnxruntime, beside exact attention.

    python examples/onnx_codec.py --artifact my.calib.safetensors --method kivi --bits 2

Needs `pip install 'calib-kv[export]' onnxruntime`. What runs behind `export` is onnxruntime and numpy alone.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from calib.cli import main

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="artifacts/tiny-llama", help="a folder or a name on the hub")
parser.add_argument("--artifact", help="what `calib fit` wrote; without it ranges are the prompt's")
parser.add_argument(
    "--method", default="rtn", help="a method whose keys lie after RoPE and need nothing measured beside: rtn, kivi"
)
parser.add_argument("--bits", type=int, default=4)
parser.add_argument("--layer", type=int, default=0)
parser.add_argument("--prompt", default="line river: 4821\nline candle: 9034\n" * 8)
asked = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="float32")
ids = AutoTokenizer.from_pretrained(asked.model)(asked.prompt, return_tensors="pt").input_ids[:, :128]
ids = ids[:, : ids.shape[1] // 32 * 32]  # whole groups of tokens
cache = DynamicCache(config=model.config)
with torch.no_grad():
    model(input_ids=ids, past_key_values=cache)
keys, values = (part.numpy() for part in (cache.layers[asked.layer].keys, cache.layers[asked.layer].values))

with tempfile.TemporaryDirectory() as folder:
    source = ["--artifact", asked.artifact] if asked.artifact else ["--model", asked.model]
    options = [
        "--method",
        asked.method,
        "--bits",
        str(asked.bits),
        "--layer",
        str(asked.layer),
        "--output",
        folder + "/graphs",
    ]
    if main(["export", "--format", "onnx", *source, *options]):
        raise SystemExit(1)

    def run(name: str, **given: np.ndarray) -> dict[str, np.ndarray]:
        """One graph of the layer on these inputs."""
        path = Path(folder, "graphs", f"layer{asked.layer}.{name}.onnx")
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return dict(zip([found.name for found in session.get_outputs()], session.run(None, given), strict=True))

    packed = {"keys": run("keys.encode", keys=keys), "values": run("values.encode", values=values)}
    fields = {f"{stream}.{name}": part for stream, own in packed.items() for name, part in own.items()}
    heads = model.config.num_attention_heads
    query = np.random.default_rng(0).standard_normal((1, heads, 1, keys.shape[3]), np.float32)
    nothing = {f"{stream}.window": part[:, :, :0] for stream, part in (("keys", keys), ("values", values))}
    found = run("attend", query=query, mask=np.ones((1, 1, keys.shape[2]), bool), **fields, **nothing)["output"]

shared = heads // keys.shape[1]
scores = query @ np.repeat(keys, shared, 1).swapaxes(2, 3) / np.sqrt(keys.shape[3])
weights = np.exp(scores - scores.max(-1, keepdims=True))
exact = weights / weights.sum(-1, keepdims=True) @ np.repeat(values, shared, 1)

held, was = sum(part.nbytes for part in fields.values()), (keys.size + values.size) * 2
print(f"{keys.shape[2]} tokens of layer {asked.layer}: {held:,} bytes packed, {was:,} in 16 bits")
print(
    f"attention differs by {np.linalg.norm(found - exact) / np.linalg.norm(exact):.4f} of its norm from exact attention"
)
