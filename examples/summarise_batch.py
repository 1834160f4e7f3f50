"""Summarises texts in batches through SpeCache: a low-bit copy of the cache on the device, the exact one in host memory.

python examples/summarise_batch.py                          # the texts beside this file
python examples/summarise_batch.py ./reports notes.txt      # every .txt of a folder, and a file
printf 'one text\nanother text\n' | python examples/summarise_batch.py -      # a text a line
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from calib.runtime import compress

INSTRUCTION = "Summarise the following text in two sentences.\n\n"
OPENING = "\n\nIn two sentences: "  # what a model without a chat template goes on from


def read(names: list[str]) -> dict[str, str]:
    """Texts by name, of folders, files and, for `-`, lines of stdin."""
    if names == ["-"]:
        return {f"line {number}": line.strip() for number, line in enumerate(sys.stdin, start=1) if line.strip()}
    files = [file for name in map(Path, names) for file in (sorted(name.glob("*.txt")) if name.is_dir() else [name])]
    return {str(file): file.read_text(encoding="utf-8").strip() for file in files}


def prompt(tokenizer: PreTrainedTokenizerBase, text: str, room: int) -> str:
    """The text, cut to `room` tokens, in the model's chat template or, without one, in a plain one."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    text = text if len(ids) <= room else tokenizer.decode(ids[:room])
    if not tokenizer.chat_template:
        return text + OPENING
    chat = [{"role": "user", "content": INSTRUCTION + text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "texts", nargs="*", default=[str(Path(__file__).with_name("texts"))], help="folders, files, or -"
    )
    parser.add_argument("--model", default="artifacts/tiny-llama", help="a folder or a hub name")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--bits", type=int, default=2, help="of the low-bit copy")
    parser.add_argument("--fetch", type=int, default=64, help="exact tokens of each KV head that a step fetches")
    asked = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    room = model.config.max_position_embeddings - asked.max_new_tokens - 64  # 64 for the template
    texts = read(asked.texts)
    names = sorted(texts, key=lambda name: len(texts[name]))  # rows of like length need little padding
    for start in range(0, len(names), asked.batch_size):
        batch = names[start : start + asked.batch_size]
        prompts = [prompt(tokenizer, texts[name], room) for name in batch]
        special = not tokenizer.chat_template  # a chat template has written its own
        inputs = tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=special, return_token_type_ids=False
        )
        with compress(model, "specache", k=asked.fetch, bits=asked.bits) as cache:
            made = model.generate(
                **inputs.to(device), past_key_values=cache, max_new_tokens=asked.max_new_tokens, do_sample=False
            )
            memory = cache.memory()
        new = made[:, inputs["input_ids"].shape[1] :]
        for name, summary in zip(batch, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            print(f"{Path(name).name}\n    {' '.join(summary.split())}")
        print(
            f"batch of {len(batch)}: {memory.measured_bytes:,} bytes on the device, {memory.host_bytes:,} in host memory\n"
        )


if __name__ == "__main__":
    main()
