"""Two model interfaces for lm-eval that run no model: one records the requested rows, the other returns known answers."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from calib.errors import RunError
from calib.evaluate.lm_eval.answers import Answer
from calib.evaluate.lm_eval.rows import Row, Scored
from calib.evaluate.lm_eval.rows_lm import RowsLM


class Recorder(RowsLM):
    """Records the rows; its answers are dummies."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, max_gen_toks: int) -> None:
        super().__init__(tokenizer, max_length, max_gen_toks)
        self.rows: list[Row] = []

    def answers(self, rows: Sequence[Row], quiet: bool) -> list[Answer]:
        """Records the rows, and returns a dummy answer of the right kind for each."""
        self.rows += rows
        return [(0.0, False) if isinstance(row, Scored) else "" for row in rows]


class Replay(RowsLM):
    """Returns known answers to rows that are requested again in the same order; raises RunError for other rows."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        max_gen_toks: int,
        answered: Sequence[tuple[Row, Answer]],
    ) -> None:
        super().__init__(tokenizer, max_length, max_gen_toks)
        self._answered = list(answered)

    @property
    def left(self) -> int:
        """Number of answers that have not been requested yet."""
        return len(self._answered)

    def answers(self, rows: Sequence[Row], quiet: bool) -> list[Answer]:
        """Returns the next answers."""
        known, self._answered = self._answered[: len(rows)], self._answered[len(rows) :]
        if [row for row, _ in known] != list(rows):
            raise RunError(
                "lm-eval's task made other requests when it was run a second time; it cannot be evaluated here"
            )
        return [answer for _, answer in known]
