"""Evaluates InfLLM after prompts of up to four times the trained context: perplexity and needles, with exact and blockwise prefill.

    python -m benchmarks.infllm_lengths --text VALIDATION [--cases 50] [--windows 12] [--write]

The embedded model was trained on rows of at most 1,024 tokens. Perplexity is that of the same last 256 tokens of each window for
every prompt length: `<s>` and the tokens before them, all in one forward. A needle is hidden in running text of each length, at
evenly spread depths; the prompt is one forward, and the answer of four digits is right if each of its tokens is the most likely one
after the true tokens before it, which are fed one at a time.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.embedded_model.cases import needle_batch
from benchmarks.embedded_model.scores import SEED
from benchmarks.embedded_model.tokenizer import encode_text, load_tokenizer
from benchmarks.protocol import keep, load
from calib.documents.corpus import TextSource
from calib.documents.running_text import RunningText
from calib.evaluate.proportion import Proportion
from calib.runtime import compress

RESULT = "infllm_lengths.json"
MODEL = "artifacts/tiny-llama"
TRAINED = 1024
LENGTHS = (512, 1024, 2048, 4096)
SCORED = 256
# A chunk attends to at most 16 + 351 + 576 + 64 tokens, which is within the trained length.
OPTIONS = {"initial": 16, "window": 320, "block": 32, "representatives": 4, "fetched": 18}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "infllm, exact": ("infllm", {**OPTIONS, "prefill": "exact"}),
    "infllm, blocks": ("infllm", {**OPTIONS, "prefill": "blocks", "chunk": 64}),
    "infllm, blocks, none fetched": ("infllm", {**OPTIONS, "prefill": "blocks", "chunk": 64, "fetched": 0}),
}


@torch.no_grad()
def nats(model: PreTrainedModel, ids: Tensor, method: str, options: dict[str, Any]) -> list[float]:
    """Returns the negative log-likelihood in nats of each of the last SCORED tokens of `ids [1, n]`, fed in one forward."""
    with compress(model, method, **options) as cache:
        logits = model(ids, past_key_values=cache, logits_to_keep=SCORED + 1).logits[0, :-1].float()
    found: list[float] = functional.cross_entropy(logits, ids[0, -SCORED:], reduction="none").tolist()
    return found


@torch.no_grad()
def is_right(model: PreTrainedModel, ids: Tensor, answer: int, method: str, options: dict[str, Any]) -> bool:
    """Returns whether each of the last `answer` tokens of `ids [1, n]` is the most likely one after those before it."""
    with compress(model, method, **options) as cache:
        at, right = ids.shape[1] - answer, True
        logits = model(ids[:, :at], past_key_values=cache, logits_to_keep=1).logits
        for column in range(at, ids.shape[1]):
            right = right and int(logits[0, -1].argmax()) == int(ids[0, column])
            if column + 1 < ids.shape[1]:
                logits = model(ids[:, column : column + 1], past_key_values=cache).logits
    return right


def windows(tokens: np.ndarray, count: int, bos: int) -> list[Tensor]:
    """Returns `count` evenly spread windows of the longest length, `[1, max(LENGTHS)]`, each beginning with `<s>`."""
    stream, size = torch.from_numpy(tokens.astype(np.int64)), max(LENGTHS) - 1
    starts = [i * (len(stream) - size) // max(1, count - 1) for i in range(count)]
    return [functional.pad(stream[start : start + size], (1, 0), value=bos)[None] for start in starts]


def perplexities(model: PreTrainedModel, rows: list[Tensor], names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns perplexity by setting and length, with the standard error of the mean nats over windows."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for length in LENGTHS:
        for name in names:
            means = []
            for row in rows:
                ids = torch.cat([row[:, :1], row[:, 1 - length :]], 1)
                own = nats(model, ids, *SETTINGS[name])
                means.append(sum(own) / len(own))
            mean = sum(means) / len(means)
            error = math.sqrt(sum((own - mean) ** 2 for own in means) / (len(means) - 1) / len(means))
            found[name][str(length)] = {"perplexity": math.exp(mean), "nats": mean, "standard_error": error}
            print(f"perplexity, {length} tokens, {name}: {math.exp(mean):.2f}", flush=True)
    return found


def needles(
    model: PreTrainedModel, tokenizer: Any, running: RunningText, cases: int, names: list[str]
) -> dict[str, dict[str, Any]]:
    """Returns the shares of right answers by setting and length, with 95 % intervals."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for length in LENGTHS:
        batch = needle_batch(tokenizer, SEED, cases, running, length)
        rows = []
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            answer = (labels >= 0).nonzero()[:, 0]
            assert int(answer[-1] - answer[0]) + 1 == len(answer)
            rows.append((ids[None, : int(answer[-1]) + 1], len(answer)))
        for name in names:
            share = Proportion(sum(is_right(model, *row, *SETTINGS[name]) for row in rows), len(rows))
            found[name][str(length)] = share.as_dict()
            low, high = share.interval
            print(f"needles, {length} tokens, {name}: {share.share:.3f} ({low:.3f}-{high:.3f})", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="text that the model was not trained on")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULT} beside the other runs")
    asked = parser.parse_args()
    model, tokenizer = load(MODEL), load_tokenizer(MODEL)
    text = TextSource(text=[Path(asked.text)]).read()
    rows = windows(encode_text(tokenizer, text), asked.windows, tokenizer.bos_token_id)
    content = {
        "model": MODEL,
        "trained_on": TRAINED,
        "scored": SCORED,
        "windows": asked.windows,
        "cases": asked.cases,
        "settings": {name: {"method": method, **options} for name, (method, options) in SETTINGS.items()},
        "perplexity": perplexities(model, rows, asked.only),
        "needles": needles(model, tokenizer, RunningText(tokenizer, text), asked.cases, asked.only),
    }
    if asked.write:
        keep(RESULT, content)


if __name__ == "__main__":
    main()
