"""Measures the loss of a model by reuse of stored chunks, and how clearly keys identify the position at which a chunk begins.

    python -m benchmarks.storage_reuse --model FOLDER [--artifact FILE] [--bits 3 2 1.5 1] [--prefix 512] [--write]

FOLDER is SmolLM2 135M as `make smollm2-model` writes it, bfloat16; the artifact is the committed one. Texts are pages and code of
this repository, which no fit has read; they are those of the checkout, so figures of two commits differ by their texts, too. The
prefix's keys and values are stored in chunks of 256 tokens, read back and attended by the next 128 tokens: KL of their predictions
from those after the uncompressed prefix, in nats per token. With `sinks` 0 the first tokens of the text are coded as well; with
`newest_exact` so many tokens before the question are replaced by the uncompressed ones, which the bytes do not count.

Starts: chunks of 1, 4, 16 and 256 tokens from each multiple of 256, with all multiples of 256 below 8,192 as candidates. `own` is
the right start's score in octaves (`runtime/storage/start.py`), `margin` how much worse the best wrong one is, `near` the score of
the start one position after the right one, `gap` the difference of the best two wrong ones, as for a chunk from elsewhere.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.protocol import keep
from calib.runtime import Artifact, Codec

RESULT = "storage_reuse.json"
ROOT = Path(__file__).parents[1]
PART = ROOT / "artifacts" / "smollm2-135m.klt.calib.safetensors"
TEXTS = ("docs/troubleshooting.md", "docs/concepts.md", "runtime/cache.py")
CHUNK, QUESTION, LONGEST = 256, 128, 8192
SIZES = (1, 4, 16, 256)


def prefix_chunk(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the model's keys and values of a prefix as a chunk `[2, layers, tokens, kv_heads * head_dim]`."""
    layers = model(ids, use_cache=True, logits_to_keep=1).past_key_values.layers
    both = [torch.stack([getattr(layer, name)[0] for layer in layers]) for name in ("keys", "values")]
    return torch.stack(both).transpose(2, 3).flatten(3).contiguous()


def predictions(model: PreTrainedModel, chunk: Tensor, ids: Tensor) -> Tensor:
    """Returns the log-probabilities at `ids` after a prefix with the keys and values of `chunk`."""
    cache = DynamicCache(config=model.config)
    heads = model.config.num_key_value_heads
    for layer, both in enumerate(chunk.unflatten(-1, (heads, -1)).transpose(2, 3).transpose(0, 1)):
        cache.update(both[:1], both[1:], layer)
    return model(ids, past_key_values=cache).logits.float().log_softmax(-1)


def stored(codec: Codec, chunk: Tensor) -> tuple[Tensor, int]:
    """Returns the prefix encoded and decoded in chunks, and the bytes of all chunks."""
    parts, size, at = [], 0, 0
    for part in chunk.split(CHUNK, 2):
        blob = codec.encode(part, at)
        size, at = size + len(blob), at + part.shape[2]
        parts.append(codec.decode(blob))
    return torch.cat(parts, 2), size


def starts(codec: Codec, keys: Tensor) -> dict[str, dict[str, float]]:
    """Returns for each size the extremes of the scores over chunks."""
    found, candidates = {}, list(range(0, LONGEST, CHUNK))
    for size in SIZES:
        own, margin, near, gap = [], [], [], []
        for start in range(0, keys.shape[1] - size + 1, CHUNK):
            part = keys[:, start : start + size]
            scores = dict(zip(candidates, codec._finder.scores(part, candidates), strict=True))
            others = sorted(score for candidate, score in scores.items() if candidate != start)
            own.append(scores[start])
            margin.append(others[0] - scores[start])
            gap.append(others[1] - others[0])
            near.append(codec._finder.scores(part, [start + 1])[0])
        found[str(size)] = {
            "own_most": max(own),
            "own_most_behind_the_first": max(own[1:]),
            "margin_least": min(margin),
            "near_least": min(near),
            "gap_most": max(gap),
        }
    return found


@torch.no_grad()
def main() -> None:
    """Measures and prints; with --write saves the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--artifact", default=PART)
    parser.add_argument("--bits", type=float, nargs="+", default=[3, 2, 1.5, 1])
    parser.add_argument("--prefix", type=int, default=512, help="tokens")
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    asked = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16).eval()
    tokenizer, artifact = AutoTokenizer.from_pretrained(asked.model), Artifact.load(asked.artifact)
    rows, told = list[dict[str, object]](), {}
    for text in TEXTS:
        ids = tokenizer((ROOT / text).read_text(), return_tensors="pt").input_ids[:, : asked.prefix + QUESTION]
        prefix, question = ids.split([asked.prefix, QUESTION], 1)
        chunk = prefix_chunk(model, prefix)
        wanted = predictions(model, chunk, question)
        for bits in asked.bits:
            for sinks, newest in ((0, 0), (4, 0), (4, 64)):
                codec = Codec.from_artifact(artifact, bits=bits, sinks=sinks)
                held, size = stored(codec, chunk)
                held[:, :, asked.prefix - newest :] = chunk[:, :, asked.prefix - newest :]
                found = predictions(model, held, question)
                row = {
                    "text": text,
                    "bits": bits,
                    "sinks": sinks,
                    "newest_exact": newest,
                    "bytes_per_token": size / asked.prefix,
                    "bytes_per_token_16_bits": chunk.nbytes / asked.prefix,
                    "kl": float((wanted.exp() * (wanted - found)).sum(-1).mean()),
                    "same_best": float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
                }
                rows.append(row)
                print(row, flush=True)
        told[text] = starts(codec, chunk[0])
        print(told[text], flush=True)
    if asked.write:
        keep(RESULT, {"prefix": asked.prefix, "question": QUESTION, "rows": rows, "starts": told})


if __name__ == "__main__":
    main()
