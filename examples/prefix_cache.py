"""A long prompt, compressed once: its cache is saved to a file, and every question begins with it.

python examples/prefix_cache.py                                                      # a few keyed lines
python examples/prefix_cache.py --prompt handbook.txt --question "Who signs?" --question "When?"

The first run reads the prompt and writes the cache; later runs, and every question, read it back.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.runtime import Artifact, compress
from calib.runtime.cache import CompressedCache

PROMPT = "line river: 4821\nline candle: 9034\nline window: 1177\n?\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="artifacts/tiny-llama", help="a folder or a hub name")
    parser.add_argument("--artifact", help="what `calib fit` wrote, a file or a hub name")
    parser.add_argument("--method", default="kivi")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--prompt", type=Path, help="a text file; a few keyed lines without one")
    parser.add_argument("--question", action="append", help="asked behind the prompt; may be given again")
    parser.add_argument(
        "--cache", type=Path, default=Path("prefix.safetensors"), help="where the prompt's cache is kept"
    )
    parser.add_argument("--max-new-tokens", type=int, default=4)
    asked = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    artifact = Artifact.from_pretrained(asked.artifact) if asked.artifact else None

    def opened(**more: Path) -> CompressedCache:
        try:
            return compress(model, asked.method, artifact, bits=asked.bits, **more)
        except ValueError as error:  # one line: what was given, what is allowed, what to do
            parser.error(str(error))

    if not asked.cache.exists():
        text = asked.prompt.read_text(encoding="utf-8") if asked.prompt else PROMPT
        ids = tokenizer(text, return_tensors="pt").input_ids.to(device)
        with opened() as cache, torch.no_grad():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            # With the ids: a question is put behind them, because a longer text may be cut into other tokens.
            cache.save(asked.cache, input_ids=ids)
            print(f"compressed {ids.shape[1]} tokens: {cache.memory()}")

    for question in asked.question or ["line river: ", "line window: "]:
        start = time.perf_counter()
        with opened(prefix=asked.cache) as cache:
            read = time.perf_counter() - start
            new = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids.to(device)
            ids = torch.cat([cache.input_ids, new], 1)
            made = model.generate(
                input_ids=ids, past_key_values=cache, max_new_tokens=asked.max_new_tokens, do_sample=False
            )
        print(f"{question!r} -> {tokenizer.decode(made[0, ids.shape[1] :])!r} (prompt read in {read:.3f} s)")


if __name__ == "__main__":
    main()
