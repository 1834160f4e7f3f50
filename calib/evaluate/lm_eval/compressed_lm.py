"""Adapter for users' scripts: `lm_eval.simple_evaluate(model=CompressedLM(model, tokenizer, "kivi", bits=2), tasks=[...])`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.errors import UsageError
from calib.evaluate.lm_eval.answers import Answer, answered
from calib.evaluate.lm_eval.rows import Row, in_batches, length_of
from calib.evaluate.lm_eval.rows_lm import RowsLM
from calib.runtime import Artifact, Memory, compress
from calib.runtime.messages.printable import printable


class CompressedLM(RowsLM):
    """A model whose log-likelihoods and generation go through the compressed cache, for lm-eval.

    Args:
        model: a causal language model in evaluation mode, on its device.
        tokenizer: the model's tokenizer.
        method: a name from `calib methods`.
        artifact: the artifact that `calib fit` wrote for the model, for methods that use one.
        batch_size: number of rows at once.
        chunk: tokens of a continuation in one forward. They attend to each other exactly, and to earlier tokens in the cache.
        max_length: most tokens of a row; None: the model's own length. Longer contexts lose their beginning.
        max_gen_toks: most new tokens of a generation if the task gives no limit.
        seed: seed of methods that use random numbers.
        options: the method's options (`bits=2`).

    Attributes:
        memories: the `cache.memory()` of each batch after its last token.

    Raises:
        ValueError: if the method or its options cannot be used with the model.
        UsageError: if a number is out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        method: str,
        artifact: Artifact | None = None,
        *,
        batch_size: int = 8,
        chunk: int = 16,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        **options: Any,
    ) -> None:
        # Fails now, rather than at the first request, if method or options cannot be used.
        compress(model, method, artifact, seed=seed, tokenizer=tokenizer, **options).release()
        longest = length_of(model.config, tokenizer) if max_length is None else max_length
        given = {"batch_size": batch_size, "chunk": chunk, "max_length": longest, "max_gen_toks": max_gen_toks}
        for name, value in given.items():
            if type(value) is not int or value < 1:
                raise UsageError(f"invalid value {printable(value)} for '{name}' (a whole number, at least 1)")
        super().__init__(tokenizer, longest, max_gen_toks)
        self.model, self.method, self.artifact, self.options, self.seed = model, method, artifact, options, seed
        self.batch_size, self.chunk = batch_size, chunk
        self.memories: list[Memory] = []

    @property
    def device(self) -> Any:
        """The model's device."""
        return self.model.device

    def answers(self, rows: Sequence[Row], quiet: bool) -> list[Answer]:
        """Answers the rows in batches, each with a new cache; answers are in the order of `rows`."""
        found: dict[int, Answer] = {}
        with tqdm(total=len(rows), disable=quiet, desc=f"through {self.method}") as bar:
            for batch in in_batches(rows, self.batch_size, self.chunk, self.max_length):
                with compress(
                    self.model, self.method, self.artifact, seed=self.seed, tokenizer=self.tokenizer, **self.options
                ) as cache:
                    made = answered(self.model, self.tokenizer, cache, batch, self.chunk)
                    self.memories.append(cache.memory())
                found.update(zip(batch.positions, made, strict=True))
                bar.update(len(batch.rows))
        return [found[position] for position in range(len(rows))]

    def get_model_info(self) -> Mapping[str, Any]:
        """Returns method, options and chunk for the `config` entry of lm-eval's results."""
        return {"cache": self.method, "cache_options": dict(self.options), "chunk": self.chunk}
