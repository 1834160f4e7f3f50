"""Feeds rows through an empty cache and returns log-likelihoods with greedy flags, or generated text.

A scored row is prefilled with its context except the last token; that token and the continuation follow in chunks. So every
prediction, even of a single token, comes from a forward that attends to the context as the cache stores it. A context of one token
has nothing to prefill: its first chunk is the prefill, and the tokens of that chunk attend to each other exactly, as in every
forward. Generation prefills the whole prompt, as `generate` does: its first token is predicted from the exact prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from calib.errors import RunError
from calib.evaluate.feed import Feed
from calib.evaluate.generation import Prompt, generated, left_padded, pad_token
from calib.evaluate.lm_eval.rows import Batch, Scored

Answer = tuple[float, bool] | str  # log-likelihood in nats and whether the continuation is greedy; or generated text


def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Cache, batch: Batch, chunk: int
) -> list[Answer]:
    """Returns the answers to a batch; continuations are fed in chunks of `chunk` tokens. Raises RunError for NaN logits."""
    rows = batch.rows
    if isinstance(rows[0], Prompt):
        return list(generated(model, tokenizer, cache, [row for row in rows if isinstance(row, Prompt)]))
    pad = pad_token(tokenizer)
    return list(log_likelihoods(model, cache, [row for row in rows if isinstance(row, Scored)], pad, chunk))


def log_likelihoods(
    model: PreTrainedModel, cache: Cache, rows: Sequence[Scored], pad: int, chunk: int
) -> list[tuple[float, bool]]:
    """Returns, for each continuation, its log-likelihood in nats and whether each of its tokens is the most likely one."""
    feed, device = Feed(model, cache), model.device
    if len(rows[0].context) > 1:
        feed(*left_padded([row.context[:-1] for row in rows], pad, device), only_last=True)
    # Rows are right-padded: no scored token attends to the padding after it.
    fed = right_padded([row.context[-1:] + row.continuation[:-1] for row in rows], pad, device)
    wanted = right_padded([row.continuation for row in rows], pad, device)
    likely, greedy = [], []
    for tokens, targets in zip(fed.split(chunk, dim=1), wanted.split(chunk, dim=1), strict=True):
        logits = feed(tokens)
        likely.append(logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0].double().cpu())
        greedy.append((logits.argmax(-1) == targets).cpu())
    behind = torch.arange(wanted.shape[1]) >= torch.tensor([len(row.continuation) for row in rows])[:, None]
    sums = torch.cat(likely, dim=1).masked_fill(behind, 0).sum(1)
    if bool(sums.isnan().any()):
        raise RunError("the model's logits are NaN")
    exact = (torch.cat(greedy, dim=1) | behind).all(1)
    return list(zip(sums.tolist(), exact.tolist(), strict=True))


def right_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> Tensor:
    """Returns right-padded ids [rows, longest] int64."""
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
