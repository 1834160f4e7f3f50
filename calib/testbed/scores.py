"""What the embedded model can do: exact answers on fresh retrieval cases, and perplexity of held-out text.

python -m calib.testbed.scores artifacts/tiny-llama --text FILE     prints both as JSON
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from calib.testbed.corpus import TextSource
from calib.testbed.curriculum import IGNORED, document_rows
from calib.testbed.generators import Piece, Style, retrieval_cases
from calib.testbed.tokenizer import encode_text, load_tokenizer


def retrieval_batch(
    tokenizer: PreTrainedTokenizerFast, seed: int, count: int, lines: int, digits: int = 4, style: Style = "line"
) -> dict[str, Tensor]:
    """`input_ids`, `labels` [count, tokens] int64 of fresh cases of the eval split; labels on the answer's digits."""
    cases = retrieval_cases(seed, count, lines, digits, style)
    documents = [[Piece(case.prompt, False), Piece(case.answer, True)] for case in cases]
    longest = max(len(tokenizer(case.prompt + case.answer).input_ids) for case in cases)
    ids, labels = zip(*document_rows(tokenizer, documents, longest), strict=True)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def exact_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """[rows] bool: whether every labelled token is the most likely one given the true tokens before it.

    For an answer at the end of its row this is exactly "greedy decoding gives the answer": the first wrong digit
    makes both false. logits [rows, tokens, vocabulary], labels [rows, tokens] int64 with -100 elsewhere.
    """
    wanted = labels[:, 1:]
    return ((logits[:, :-1].argmax(-1) == wanted) | (wanted == IGNORED)).all(dim=1)


def token_windows(tokens: np.ndarray, length: int, bos: int) -> list[Tensor]:
    """Consecutive windows of `length - 1` tokens behind `<s>`, each [length] int64; the incomplete tail is left out."""
    stream = torch.from_numpy(tokens.astype(np.int64))
    whole = stream[: len(stream) // (length - 1) * (length - 1)].view(-1, length - 1)
    if not len(whole):
        raise ValueError(f"{len(stream)} tokens of text: at least {length - 1} are needed for one window")
    return list(functional.pad(whole, (1, 0), value=bos))


@torch.no_grad()
def retrieval_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int, count: int, lines: int, style: Style = "line"
) -> float:
    """Share of `count` fresh cases of `lines` lines whose four digits are all right."""
    batch = retrieval_batch(tokenizer, seed, count, lines, style=style)
    right = [
        exact_answers(model(input_ids=ids).logits, labels)
        for ids, labels in zip(batch["input_ids"].split(20), batch["labels"].split(20), strict=True)
    ]
    return torch.cat(right).double().mean().item()


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str, length: int = 512
) -> dict[str, float]:
    """Perplexity per token and bits per character over consecutive windows of `length` tokens, each behind `<s>`."""
    tokens = encode_text(tokenizer, text)
    total, count = 0.0, 0
    for ids in torch.stack(token_windows(tokens, length, tokenizer.bos_token_id)).split(8):
        logits = model(input_ids=ids).logits[:, :-1].float()
        total += functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    nats = total / count
    return {"perplexity": math.exp(nats), "bits_per_character": nats / math.log(2) * len(tokens) / len(text)}


def scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str | None, seed: int = 20, cases: int = 200
) -> dict[str, float]:
    """Retrieval at 5 to 60 lines and, with `text`, its perplexity; every figure under a name that says what it is."""
    figures = {
        f"retrieval_{n}_lines": retrieval_accuracy(model, tokenizer, seed, cases, n) for n in (5, 10, 20, 40, 60)
    }
    if text is not None:
        figures |= perplexity(model, tokenizer, text)
    return figures


def main() -> None:
    """Measures an exported folder in float32 and prints JSON."""
    parser = argparse.ArgumentParser(prog="python -m calib.testbed.scores", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path, help="an exported folder")
    parser.add_argument("--text", type=Path, help="text file for perplexity")
    parser.add_argument("--cases", type=int, default=200, help="retrieval cases for each number of lines")
    parser.add_argument("--seed", type=int, default=20, help="of the retrieval cases")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, local_files_only=True).eval()
    text = TextSource(text=[arguments.text]).read() if arguments.text else None
    print(json.dumps(scores(model, load_tokenizer(arguments.model), text, arguments.seed, arguments.cases), indent=2))


if __name__ == "__main__":
    main()
