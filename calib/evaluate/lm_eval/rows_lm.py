"""lm-eval's model interface: requests are tokenised as for lm-eval's own transformers models, and one method answers the rows."""

import abc
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from calib.errors import UsageError
from calib.evaluate.lm_eval.answers import Answer
from calib.evaluate.lm_eval.rows import Row, prompt, scored


class RowsLM(TemplateLM):
    """Base class that turns lm-eval's requests into rows; a subclass answers the rows.

    Args:
        tokenizer: the model's tokenizer.
        max_length: most tokens of a row; longer contexts lose their beginning.
        max_gen_toks: most new tokens of a generation if the task gives no limit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, max_gen_toks: int = 256) -> None:
        super().__init__()
        self.tokenizer, self.max_length, self.max_gen_toks = tokenizer, max_length, max_gen_toks

    @abc.abstractmethod
    def answers(self, rows: Sequence[Row], quiet: bool) -> list[Answer]:
        """Returns one answer for each row; `quiet` hides the progress bar."""

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        first = self.tokenizer.bos_token_id
        first = self.eot_token_id if first is None else first
        if first is None:
            raise UsageError("this tokenizer has no first token to stand for an empty context; use another model")
        return int(first)

    @property
    def tokenizer_name(self) -> str:
        """Name by which lm-eval distinguishes chat templates."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation with the chat template; without a generation prompt the last message is left open to continue."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the ids of a text; by default with special tokens, unless the text already begins with the first one."""
        first = self.tokenizer.bos_token or self.tokenizer.eos_token
        if add_special_tokens is None and first and string.startswith(first):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any) -> list[Any]:
        """Returns (log-likelihood in nats, whether it is greedy) for each ((context, continuation), their ids)."""
        rows = [scored(context, continuation, self.max_length) for _, context, continuation in requests]
        found = self.answers(rows, disable_tqdm)
        for (texts, *_), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood in nats of each whole text, in lm-eval's windows of the model's length."""
        texts = [request.args[0] for request in requests]
        windows = [
            [
                scored(*make_disjoint_window(window), self.max_length)
                for window in get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for text in texts
        ]
        found = iter(self.answers([row for rows in windows for row in rows], disable_tqdm))
        sums = [sum((float(next(found)[0]) for _ in rows), 0.0) for rows in windows]
        for text, nats in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), nats)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text generated after each prompt, up to the first stop text."""
        ends = [] if self.eot_token_id is None else [self.tokenizer.decode(self.eot_token_id)]
        rows = []
        for text, settings in (request.args for request in requests):
            ids = self.tok_encode(text) or [self.prefix_token_id]
            rows.append(prompt(ids, settings, ends, self.max_gen_toks, self.max_length))
        found = [str(answer) for answer in self.answers(rows, disable_tqdm)]
        for request, made in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, made)
        return found
