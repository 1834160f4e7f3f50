"""Feeds tokens through a model and its cache piece by piece, for left-padded rows of different length."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from calib.capture.device_map import check_token_ids
from calib.errors import RunError
from calib.runtime import cache_argument


class Feed:
    """Forwards successive pieces of the same rows, and keeps track of their attention mask and positions.

    Args:
        model: a causal language model.
        cache: an empty cache attached to it.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.mask: Tensor | None = None
        self.keeps_logits = bool(model._supports_logits_to_keep())

    @torch.no_grad()
    def __call__(self, tokens: Tensor, mask: Tensor | None = None, only_last: bool = False) -> Tensor:
        """Forward `tokens` [rows, tokens] int64 and return logits [rows, tokens or 1, vocabulary] float32.

        `mask` [rows, tokens] int64 is 1 for real tokens and 0 for padding; without it all tokens are real. Positions count the
        real tokens of a row. With `only_last` the logits are those of the last token only. Raises RunError for a token id that is
        not in the model's vocabulary, and for NaN logits.
        """
        check_token_ids(self.model, tokens)
        new = torch.ones_like(tokens) if mask is None else mask
        self.mask = new if self.mask is None else torch.cat((self.mask, new), dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits = self.model(
            input_ids=tokens,
            attention_mask=self.mask,
            position_ids=positions,
            **{cache_argument.NAME: self.cache},
            use_cache=True,
            **({"logits_to_keep": 1} if only_last and self.keeps_logits else {}),
        ).logits
        logits = (logits[:, -1:] if only_last else logits).float()
        if bool(logits[:, -1].isnan().any()):  # the last token is real in every row
            raise RunError("the model's logits are NaN")
        return logits
