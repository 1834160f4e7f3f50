"""Rows through an empty cache: log-likelihoods and greedy flags, or text.

A row is prefilled with its context but the last token; that one and the continuation follow in chunks. So every prediction,
that of a single token as well, comes from a forward that meets the context as the cache keeps it. A context of one token
has nothing to prefill: its first chunk is the prefill, and those tokens see each other exactly, as in every forward.
Generation prefills the whole prompt, as a user's `generate` does: its first token is predicted from the exact prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from calib.errors import RunError
from calib.evaluate.feed import Feed
from calib.evaluate.lm_eval.rows import Batch, Prompt, Scored

Answer = tuple[float, bool] | str  # nats and whether greedy decoding gives the continuation; or what was generated


def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Cache, batch: Batch, chunk: int
) -> list[Answer]:
    """The answers to a batch, each chunk of a continuation `chunk` tokens; raises RunError for logits that are NaN."""
    rows = batch.rows
    if isinstance(rows[0], Prompt):
        return list(generated(model, tokenizer, cache, [row for row in rows if isinstance(row, Prompt)]))
    pad = pad_token(tokenizer)
    return list(log_likelihoods(model, cache, [row for row in rows if isinstance(row, Scored)], pad, chunk))


def log_likelihoods(
    model: PreTrainedModel, cache: Cache, rows: Sequence[Scored], pad: int, chunk: int
) -> list[tuple[float, bool]]:
    """Of each continuation, in nats; and whether each of its tokens is the most likely one."""
    feed, device = Feed(model, cache), model.device
    if len(rows[0].context) > 1:
        feed(*left_padded([row.context[:-1] for row in rows], pad, device), only_last=True)
    # What stands behind the end of a shorter row is seen by nothing that is asked of it.
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


@torch.no_grad()
def generated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Cache, rows: Sequence[Prompt]
) -> list[str]:
    """What the model adds to each prompt before the first of its stop texts; settings are the first row's."""
    pad, first = pad_token(tokenizer), rows[0]
    tokens, mask = left_padded([row.context for row in rows], pad, model.device)
    ends = EndTexts(tokenizer, first.until, tokens.shape[1])
    made = model.generate(
        tokens,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=first.new,
        stopping_criteria=StoppingCriteriaList([ends]),
        pad_token_id=pad,
        **first.options,
    )
    last = model.generation_config.eos_token_id
    last = {last} if isinstance(last, int) else set(last or ())
    texts = []
    for ids in made[:, tokens.shape[1] :].tolist():
        end = next((at for at, token in enumerate(ids) if token in last), len(ids))  # behind it the row was filled up
        texts.append(before(tokenizer.decode(ids[:end], skip_special_tokens=True), first.until))
    return texts


class EndTexts(StoppingCriteria):
    """Ends a row when one of `texts` has been generated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompt: int) -> None:
        self.tokenizer, self.texts, self.prompt = tokenizer, texts, prompt
        self.ended: set[int] = set()
        # A token holds at least one byte; one token more for those whose decoding depends on what stands before them.
        self.tail = max((len(text.encode()) for text in texts), default=0) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """[rows] bool: whether the row is at its end."""
        new = input_ids[:, self.prompt :]
        for row, text in enumerate(self.tokenizer.batch_decode(new[:, -self.tail :])):
            if any(end in text for end in self.texts):
                self.ended.add(row)
        return torch.tensor([row in self.ended for row in range(len(new))], device=input_ids.device)


def before(text: str, ends: Sequence[str]) -> str:
    """The text before the first of `ends` in it."""
    return text[: min((text.find(end) for end in ends if end in text), default=len(text))]


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What pads a row; nothing attends to it."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in found if token is not None)


def left_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and the mask of real ones, [rows, longest] int64 each."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def right_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> Tensor:
    """Ids [rows, longest] int64."""
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
