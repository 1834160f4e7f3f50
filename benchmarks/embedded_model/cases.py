"""Evaluation cases as batches: keyed lines and needles of the eval split, one row each, labels on the answers' digits."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.embedded_model.token_rows import document_rows
from calib.documents.generators import Keys, Piece, keyed_lines, keyed_random, needles, retrieval_cases
from calib.documents.running_text import RunningText

Batch = dict[str, Tensor]  # `input_ids` and `labels`, [rows, tokens] int64; labels are -100 off the answers


def retrieval_batch(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    count: int,
    lines: int,
    keys: Keys = "words",
) -> Batch:
    """`count` cases of `lines` keyed lines and one query."""
    cases = retrieval_cases(seed, count, lines, keys=keys)
    return batch(tokenizer, [[Piece(case.prompt, False), Piece(case.answer, True)] for case in cases])


def multi_query_batch(tokenizer: PreTrainedTokenizerFast, seed: int, count: int, lines: int, queries: int) -> Batch:
    """`count` cases of `lines` keyed lines and `queries` queries of different lines, all to be answered."""
    documents = []
    for index in range(count):
        rng = keyed_random("multi-query", seed, index, lines, queries)
        documents.append(list(keyed_lines(rng, lines, queries, split="eval")))
    return batch(tokenizer, documents)


def needle_batch(tokenizer: PreTrainedTokenizerFast, seed: int, count: int, running: RunningText, tokens: int) -> Batch:
    """`count` cases of one needle in `tokens` tokens of running text.

    Case i hides it at depth (i + 1/2) / count, so the cases cover every depth evenly, in order.
    """
    documents = []
    for index in range(count):
        rng = keyed_random("needle", seed, index, tokens)
        window = running.window(rng, tokens)
        documents.append(list(needles(rng, window, [(index + 0.5) / count], split="eval")))
    return batch(tokenizer, documents)


def batch(tokenizer: PreTrainedTokenizerFast, documents: list[list[Piece]]) -> Batch:
    """The documents as rows of the longest one's length."""
    ids, labels = zip(*document_rows(tokenizer, documents), strict=True)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def row_batches(rows: Batch) -> list[Batch]:
    """The same rows in batches of at most 20."""
    ids, labels = rows["input_ids"].split(20), rows["labels"].split(20)
    return [{"input_ids": some, "labels": theirs} for some, theirs in zip(ids, labels, strict=True)]
