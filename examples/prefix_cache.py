"""A long prompt, compressed once: its cache is saved to a file, and every question begins with it.

    python examples/prefix_cache.py --prompt handbook.txt --question "Who signs?" --question "When?"

The first run reads the prompt and writes the cache; later runs, and every question, read it back.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.runtime import Artifact, compress

LINES = "\n".join(f"line {name}: {number}" for name, number in (("river", 4821), ("candle", 9034), ("window", 1177)))

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="artifacts/tiny-llama", help="a folder or a name on the hub")
parser.add_argument("--artifact", help="what `calib fit` wrote; methods with dictionaries need it")
parser.add_argument("--method", default="kivi")
parser.add_argument("--bits", type=int, default=4)
parser.add_argument("--prompt", type=Path, help="a text file; a few keyed lines without one")
parser.add_argument("--question", action="append", help="asked behind the prompt; may be given again")
parser.add_argument(
    "--cache", type=Path, default=Path("prefix.safetensors"), help="where the compressed prompt is kept"
)
parser.add_argument("--new-tokens", type=int, default=4)
asked = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="bfloat16")
tokenizer = AutoTokenizer.from_pretrained(asked.model)
settings = {
    "method": asked.method,
    "artifact": Artifact.load(asked.artifact) if asked.artifact else None,
    "bits": asked.bits,
}
prompt = asked.prompt.read_text(encoding="utf-8") if asked.prompt else f"{LINES}\n?\n"

if not asked.cache.exists():
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with compress(model, **settings) as cache, torch.no_grad():
        start = time.perf_counter()
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        print(f"compressed {ids.shape[1]} tokens in {time.perf_counter() - start:.2f} s: {cache.memory()}")
        # The ids as well: a question is put behind them, because a longer text may be cut into tokens differently.
        cache.save(asked.cache, input_ids=ids)

for question in asked.question or ["line river: ", "line window: "]:
    start = time.perf_counter()
    with compress(model, **settings, prefix=asked.cache) as cache:
        loaded = time.perf_counter() - start
        ids = torch.cat(
            [cache.input_ids, tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids], 1
        )
        out = model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=asked.new_tokens, do_sample=False)
    print(f"{question!r} -> {tokenizer.decode(out[0, ids.shape[1] :])!r} (prompt read in {loaded:.3f} s)")
