"""lm-eval's requests as rows of tokens: a continuation to score, or a prompt to continue."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from calib.errors import UsageError
from calib.evaluate.generation import Prompt
from calib.runtime.messages.printable import printable

LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")  # entries of configurations with a model's length
UNKNOWN_LENGTH, UNLIMITED = 2048, 10**18  # lm-eval's default length; tokenizers' value for "no limit" is larger
LIMITS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # names of the limit of new tokens; the first one that is given counts


class Scored(NamedTuple):
    """A continuation to score: ids of its context and its own ids, at least one each."""

    context: list[int]
    continuation: list[int]


Row = Scored | Prompt


class Batch(NamedTuple):
    """Rows of one kind that are fed together, and their indices among all rows."""

    positions: list[int]
    rows: Sequence[Row]

    def prefill(self, chunk: int) -> list[int]:
        """Returns the tokens of each row's first forward."""
        return [
            len(row.context) - 1 or min(chunk, self.most()) if isinstance(row, Scored) else len(row.context)
            for row in self.rows
        ]

    def lengths(self) -> list[int]:
        """Returns the tokens of each row in the cache at the end; for generation, at most so many."""
        return [len(row.context) - 1 + (self.most() if isinstance(row, Scored) else row.new) for row in self.rows]

    def most(self) -> int:
        """Returns the tokens fed to each row after its prefill (all of the context except its last token): those of the longest
        continuation."""
        return max(len(row.continuation) for row in self.rows if isinstance(row, Scored))


def length_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the model's length in tokens from its configuration or tokenizer, or lm-eval's default if neither has one."""
    text = config.get_text_config(decoder=True)
    known = [getattr(text, name, None) for name in LENGTHS]
    limit = getattr(tokenizer, "model_max_length", None)
    known.append(limit if limit is not None and limit < UNLIMITED else None)
    return int(next((length for length in known if length is not None), UNKNOWN_LENGTH))


def scored(context: list[int], continuation: list[int], longest: int) -> Scored:
    """Returns a row whose context is cut on the left so that at most `longest` tokens are fed (the last token is not fed).

    Raises UsageError for an empty continuation, and for one that is longer than `longest`.
    """
    if not continuation:
        raise UsageError("lm-eval asks for a continuation without tokens; this tokenizer cannot serve the task")
    if len(continuation) > longest:
        raise UsageError(f"a continuation takes {len(continuation)} tokens and this model was made for {longest}")
    return Scored(context[-(longest + 1 - len(continuation)) :], continuation)


def prompt(context: list[int], settings: Mapping[str, Any], ends: Sequence[str], new: int, longest: int) -> Prompt:
    """Returns the row of a generation request, with its context cut on the left so that the new tokens fit.

    Args:
        context: ids of the prompt.
        settings: lm-eval's `generation_kwargs`; a temperature above 0 samples, as `do_sample` does.
        ends: texts that end an answer, in addition to the task's own.
        new: most new tokens if the settings give no limit.
        longest: the model's length in tokens.

    Raises:
        UsageError: if the new tokens leave no room for a prompt, or stop texts are no strings.
    """
    options = dict(settings)
    given = [options.pop(name, None) for name in LIMITS]
    new = int(next((limit for limit in given if limit is not None), new))
    if not 0 < new < longest:
        raise UsageError(
            f"max_gen_toks={new} leaves no room for a prompt in the {longest} tokens that this model was made for; "
            "give a smaller max_gen_toks"
        )
    until = options.pop("until", None) or []
    until = [until] if isinstance(until, str) else list(until)
    if not all(isinstance(text, str) for text in until):
        raise UsageError(f"lm-eval's generation_kwargs.until must be texts, got {printable(until)}")
    options.pop("max_length", None)  # limits prompt and answer; lm-eval's tasks use `max_gen_toks`
    sampling = bool(options.get("do_sample", float(options.get("temperature") or 0) > 0))
    if not sampling:
        options.pop("temperature", None)
    stops = [text for text in dict.fromkeys([*until, *ends]) if text]
    return Prompt(context[-(longest - new) :], new, stops, {**options, "do_sample": sampling})


def in_batches(rows: Sequence[Row], size: int, chunk: int, longest: int) -> list[Batch]:
    """Groups rows into batches that can be fed together with little padding.

    Shorter continuations are right-padded to the longest of the batch, so rows with equal numbers of chunks are grouped, and
    padding must not exceed the model's length `longest`. Rows with a context of one token have no prefill and are never mixed with
    others, nor are prompts with different settings.
    """
    found: list[Batch] = []
    kind: tuple[Any, ...] | None = None
    for position in sorted(range(len(rows)), key=lambda position: order(rows[position], chunk)):
        row = rows[position]
        if kind == fed_like(row) and len(found[-1].rows) < size:
            joined = Batch([*found[-1].positions, position], [*found[-1].rows, row])
            if isinstance(row, Prompt) or max(joined.lengths()) <= longest:
                found[-1] = joined
                continue
        kind = fed_like(row)
        found.append(Batch([position], [row]))
    return found


def fed_like(row: Row) -> tuple[Any, ...]:
    """Returns a key that is equal for rows that may be in one batch."""
    if isinstance(row, Scored):
        return "scored", len(row.context) == 1
    return "prompt", row.new, row.until, json.dumps(row.options, sort_keys=True, default=str)


def order(row: Row, chunk: int) -> tuple[Any, ...]:
    """Returns a sort key: neighbours need little padding, and the longest rows come first, so that lack of memory shows early."""
    if isinstance(row, Scored):
        chunks = -(-len(row.continuation) // chunk)
        return *fed_like(row), -chunks, -len(row.context) - len(row.continuation), len(row.context)
    return *fed_like(row), -len(row.context)
