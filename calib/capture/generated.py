"""A corpus generated without network or text files: half retrieval documents, half text sampled from the model.

Retrieval documents (`calib.documents.generators`) need the long-range lookups that a compressed cache loses first;
text sampled from the model itself at temperature 1 is what the model's cache holds when it generates.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from calib.capture.corpus import pack
from calib.capture.device_map import entry_device
from calib.capture.language_model import without_notes
from calib.documents.generators import keyed_lines, keyed_random
from calib.errors import UsageError

ROWS = 64  # sequences sampled at once


def generated_sequences(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int
) -> Tensor:
    """Returns `count` sequences, alternately packed retrieval documents and sampled text: int64 `[count, length]`."""
    first = first_token(tokenizer)
    retrieval = torch.tensor(list(pack(retrieval_documents(tokenizer, seed), first, length, -(-count // 2))))
    sampled = sampled_text(model, first, length, count // 2, seed)
    return spread(retrieval, sampled.cpu())


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the first token of sampled sequences: BOS, else EOS; raises UsageError if the tokenizer has neither."""
    first: int | None = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise UsageError(
            "sampled text needs a tokenizer with a first token (<s>): give text with data.text=FILE and data.sampled=0"
        )
    return first


def spread(some: Tensor, others: Tensor) -> Tensor:
    """Returns the rows of both `[count, length]` interleaved: each in its order, and the fewer ones evenly among the others."""
    positions = torch.cat([(torch.arange(len(x), dtype=torch.float32) + 0.5) / max(1, len(x)) for x in (some, others)])
    return torch.cat([some, others])[positions.argsort(stable=True)]


def retrieval_documents(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[list[int]]:
    """Yields token lists of keyed-line documents without end: 5 to 40 lines, 1, 2 or 4 digits, both styles, four queries each."""
    number = 0
    while True:
        rng = keyed_random("calibration", seed, number)
        style = rng.choice(("line", "plain"))
        pieces = keyed_lines(rng, lines=rng.randint(5, 40), queries=4, digits=rng.choice((1, 2, 4)), style=style)
        yield tokenizer("".join(piece.text for piece in pieces), add_special_tokens=False)["input_ids"]
        number += 1


def sampled_text(model: PreTrainedModel, first: int, length: int, count: int, seed: int) -> Tensor:
    """Returns sequences sampled from the model after token `first`, at temperature 1: int64 `[count, length]`, on its device."""
    if count == 0:
        return torch.empty(0, length, dtype=torch.int64)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length - 1,
        pad_token_id=first,
        eos_token_id=None,  # sampling goes on after an end of text, so that every sequence is full
    )
    device = entry_device(model)
    parts = []
    # Random numbers come from the generator of the device that takes the token ids.
    with (
        torch.no_grad(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        without_notes(),
        generating_by(model, settings),
    ):
        torch.manual_seed(seed)
        for start in range(0, count, ROWS):
            rows = min(ROWS, count - start)
            prompt = torch.full((rows, 1), first, device=device)
            parts.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings))
    return torch.cat(parts)


@contextmanager
def generating_by(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """Context in which `settings` are the model's generation config: transformers fills each None of a call's from the model's."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own
