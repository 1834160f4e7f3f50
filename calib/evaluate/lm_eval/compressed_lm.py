"""The adapter for scripts: `lm_eval.simple_evaluate(model=CompressedLM(model, tokenizer, "kivi", bits=2), tasks=[...])`."""

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
        tokenizer: the model's.
        method: a name from `calib methods`.
        artifact: what `calib fit` wrote for the model, where the method uses it.
        batch_size: rows at once.
        chunk: tokens of a continuation in a forward. They see each other exactly; what is before them comes from the cache.
        max_length: tokens of a row at most; None: those the model was made for. Longer contexts lose their beginning.
        max_gen_toks: new tokens of a generation at most, where the task does not say.
        seed: of methods that draw.
        options: the method's own (`bits=2`).

    Attributes:
        memories: each batch's `cache.memory()` at the end of its rows.

    Raises:
        ValueError: a method or options that the model's cache refuses.
        UsageError: a number out of range.
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
        # Refuses now what it would refuse later.
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
        """The model's."""
        return self.model.device

    def answers(self, rows: Sequence[Row], quiet: bool) -> list[Answer]:
        """Every batch through a cache of its own."""
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
        """For the `config` of lm-eval's results: the method, its options and the chunk."""
        return {"cache": self.method, "cache_options": dict(self.options), "chunk": self.chunk}
