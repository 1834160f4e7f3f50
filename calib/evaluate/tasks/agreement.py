"""Agreement with the full cache: differences in predictions and attention outputs when both caches read the same text.

The text is fed as a prefill and then chunks, as for perplexity; every token after the prefill is compared. The full cache is our
own `full`, so that only the compression differs. Three measures, each over all compared tokens:

1. token agreement: the share whose most likely next token is the same.
2. KL: the mean of sum_v p(v) log(p(v) / q(v)) in nats, p with the full cache, q with the method's.
3. attention error of a layer: |a - b| / |b| (L2), where a and b are the outputs of its attention module (after the output
   projection) with the method's cache and with the full one. Both are fed the same tokens, but a layer's input contains the
   errors of earlier layers, as it does when the model is used.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from calib.capture.capture import attention_modules
from calib.errors import RunError, UsageError
from calib.evaluate.bootstrap import mean_interval
from calib.evaluate.feed import Feed
from calib.evaluate.tasks.chunked_text import ChunkedText, ChunkedTextColumn
from calib.evaluate.tasks.contract import Column, Subject
from calib.runtime import compress

LOGIT = 4  # bytes of a float32 logit
KEPT_BYTES = 2**30  # host memory for the full cache's answers of a column; the others are computed for each method


@dataclass(frozen=True)
class Agreement(ChunkedText):
    """A task with one column; its options are those of `ChunkedText`."""

    name = "agreement"
    purpose = "compare"

    title: str = "agreement"

    def columns(self, subject: Subject) -> list[Column]:
        """Reads the text; raises UsageError for sequences beyond the model's positions, or text too short for one sequence."""
        return [AgreementColumn(self, subject)]


class Answer(NamedTuple):
    """The model's results for one chunk: logits [rows, chunk, vocabulary] float32, attention outputs [rows, layers, chunk,
    hidden]."""

    logits: Tensor
    outputs: Tensor

    def to(self, device: torch.device | str) -> "Answer":
        """Returns the same answer on `device`."""
        return Answer(self.logits.to(device), self.outputs.to(device))


class Distance(NamedTuple):
    """Sums over compared tokens.

    Attributes:
        same: number of equal most likely tokens [rows].
        nats: KL divergences [rows].
        wrong: squared norms of differences of attention outputs [rows, layers].
        size: squared norms of the full cache's attention outputs [rows, layers].
    """

    same: Tensor
    nats: Tensor
    wrong: Tensor
    size: Tensor


class Sequences(NamedTuple):
    """Batch `number` of a column: tokens [rows, length] int64."""

    number: int
    tokens: Tensor


class AgreementColumn(ChunkedTextColumn):
    """Sequences of one text, and the full cache's answers to them, which are computed once, for the first method.

    At most `KEPT_BYTES` of the answers are kept, in host memory; the others are computed again for each method, chunk by chunk in
    step with the method's own.
    """

    measure_name = "token agreement, KL, attention error"
    logit_bytes = 48  # both caches' logits in float32, and up to five float64 tensors while they are compared

    def __init__(self, task: Agreement, subject: Subject) -> None:
        super().__init__(task, subject)
        self.modules = {int(module.layer_idx): module for module in attention_modules(subject.model)}
        if not self.modules:
            raise UsageError(
                f"tasks.agreement: {type(subject.model).__name__} has no attention layer whose output could be compared"
            )
        self.length = float(task.length)
        config = subject.model.config.get_text_config(decoder=True)
        outputs = len(self.modules) * config.hidden_size * subject.model.dtype.itemsize
        self.kept_bytes = min(KEPT_BYTES, self.rows * task.counted * (config.vocab_size * LOGIT + outputs))
        self._kept: dict[int, list[Answer]] = {}
        self._room = KEPT_BYTES

    def batches(self) -> list[Sequences]:
        """Returns the sequences in batches of at most batch_size."""
        return [Sequences(number, tokens) for number, tokens in enumerate(self.text.batches())]

    def measure(self, cache: Cache, batch: Sequences) -> Distance:
        """Returns the distance between the answers to the batch with `cache` and those with the full cache."""
        with closing(self._full(batch)) as wanted:
            pairs = zip(wanted, self._answers(cache, batch.tokens), strict=True)
            chunks = [distance(answer, full) for full, answer in pairs]
        return Distance(*(torch.stack(parts).sum(0).cpu() for parts in zip(*chunks, strict=True)))

    def summary(self, parts: Sequence[Distance]) -> dict[str, float | int]:
        """Returns agreement and KL with 95 % intervals (bootstrap over sequences), the error of every layer and their mean."""
        same, nats, wrong, size = (torch.cat(part) for part in zip(*parts, strict=True))
        errors = (wrong.sum(0) / size.sum(0)).sqrt()
        if not (nats.isfinite().all() and errors.isfinite().all()):
            raise RunError("the model's logits or attention outputs are not finite")
        compared, seed = self.task.counted, self.subject.seed
        low, high = mean_interval((same / compared).numpy(), seed)
        kl_low, kl_high = mean_interval((nats / compared).numpy(), seed)
        return {
            "agreement": float(same.mean() / compared),
            "low": low,
            "high": high,
            "kl": float(nats.mean() / compared),
            "kl_low": kl_low,
            "kl_high": kl_high,
            "error": float(errors.mean()),
            "sequences": len(same),
            "tokens": len(same) * compared,
            **{f"error at layer {layer}": float(error) for layer, error in zip(self.modules, errors, strict=True)},
        }

    def words(self, figures: dict[str, float | int]) -> str:
        """Returns "0.953 [0.940, 0.962], 0.0412 [0.0380, 0.0441], 0.118"."""
        return "{agreement:.3f} [{low:.3f}, {high:.3f}], {kl:.4f} [{kl_low:.4f}, {kl_high:.4f}], {error:.3f}".format(
            **figures
        )

    def brief(self, figures: dict[str, float | int]) -> str:
        """Returns "0.953 0.0412 0.118"."""
        return "{agreement:.3f} {kl:.4f} {error:.3f}".format(**figures)

    def _full(self, batch: Sequences) -> Generator[Answer]:
        """Yields the full cache's answers to the batch, chunk by chunk, from memory or computed now."""
        if batch.number in self._kept:
            yield from (answer.to(batch.tokens.device) for answer in self._kept[batch.number])
            return
        taken: list[Answer] = []
        room = self._room
        with compress(self.subject.model, "full") as cache:
            for answer in self._answers(cache, batch.tokens):
                yield answer
                room -= answer.logits.nbytes + answer.outputs.nbytes
                if room < 0:  # no answers of this batch are kept
                    taken.clear()
                else:
                    taken.append(answer.to("cpu"))
        if room >= 0:
            self._kept[batch.number], self._room = taken, room

    def _answers(self, cache: Cache, tokens: Tensor) -> Iterator[Answer]:
        """Yields logits and attention outputs for the tokens after the prefill, chunk by chunk; `cache` must be empty."""
        feed, task = Feed(self.subject.model, cache), self.task
        feed(tokens[:, : task.prefill], only_last=True)
        for chunk in tokens[:, task.prefill :].split(task.chunk, dim=1):
            with outputs_of(self.modules) as outputs:
                logits = feed(chunk)
            # A speculative method's forward appends a speculative token to the given tokens; its output is cut off.
            yield Answer(logits, torch.stack([outputs[layer][:, : chunk.shape[1]] for layer in self.modules], dim=1))


@contextmanager
def outputs_of(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Context manager: the yielded mapping has the last output of each module under the module's number."""
    found: dict[int, Tensor] = {}

    def keep(layer: int, module: nn.Module, given: Any, output: Any) -> None:
        found[layer] = output[0] if isinstance(output, tuple) else output

    hooks = [module.register_forward_hook(partial(keep, layer)) for layer, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def distance(answer: Answer, full: Answer) -> Distance:
    """Returns the sums over one chunk, in float64."""
    same = (answer.logits.argmax(-1) == full.logits.argmax(-1)).double().sum(1)
    q, p = (logits.double().log_softmax(-1) for logits in (answer.logits, full.logits))
    nats = (p.exp() * (p - q)).sum((1, 2))
    a, b = answer.outputs.double(), full.outputs.double()
    return Distance(same, nats, (a - b).square().sum((2, 3)), b.square().sum((2, 3)))
