"""Clip factors: the share of a group's range that a quantiser should cover.

Tensors: `keys.clip.FORM` and `values.clip.FORM`, float32 `[layers, kv_heads, bits]` in (0, 1], one for each form of
`forms.py`. A factor c < 1 shrinks the measured range: steps become finer, and the few values outside are clipped.

The factor is chosen by the error of the attention output, not of the tensor: on a trained model the least squared error
of keys and values does not give the least perplexity, because attention weighs tokens and queries weigh channels.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.errors import UsageError
from calib.side_by_side import side_by_side
from calib.statistics.attention_error import Reference
from calib.statistics.contract import Statistic
from calib.statistics.forms import Candidates, forms

FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3)
BITS = (1, 2, 3, 4)
# The search stops at an error of FAR times the least of the sequence: smaller factors (at 1 bit: larger) are worse still.
FAR = 1.5


class ClipFactors(Statistic):
    """For every form, layer, KV head and bit width, the factor with the least error on the corpus.

    The error is that of the attention outputs of the KV head's query heads when only this stream is quantised. Ties go to
    the larger factor. On each sequence factors are tried from the largest down (at 1 bit, where small ones are best, from
    the smallest up) until all heads' errors exceed `FAR` times their least; the factors not tried get the last error.

    Args:
        shape: the model's sizes.
        bits: increasing bit widths, 1 to 8.
        factors: decreasing candidates in (0, 1]; 1 must be one of them.
        rows: query rows used in each sequence.
    """

    def __init__(
        self, shape: Shape, bits: Sequence[int] = BITS, factors: Sequence[float] = FACTORS, rows: int = 32
    ) -> None:
        super().__init__()
        if not bits or list(bits) != sorted(set(bits)) or not all(1 <= width <= 8 for width in bits):
            raise UsageError(f"model.bits={list(bits)}: increasing bit widths from 1 to 8, such as [2, 4]")
        falling = list(factors) == sorted(set(factors), reverse=True) and all(0 < factor <= 1 for factor in factors)
        if not falling or not factors or factors[0] != 1:
            raise UsageError(f"model.clip_factors={list(factors)}: decreasing numbers from 1 down to above 0")
        if rows < 1:
            raise UsageError(f"model.query_rows={rows}: must be at least 1")
        self.bits, self.factors, self.rows = tuple(bits), tuple(factors), rows
        self.forms = forms(shape.head_dim)
        self.ranges: Mapping[str, Tensor] = {}
        for number, _ in enumerate(self.forms):
            sizes = (shape.layers, shape.kv_heads, len(self.bits), len(self.factors))
            self.register_buffer(f"error_{number}", torch.zeros(sizes, dtype=torch.float64))
        self.reductions = {f"error_{number}": "sum" for number, _ in enumerate(self.forms)}

    def observe(self, sample: LayerSample) -> None:
        """Adds the errors of every form, bit width and factor; `ranges` must hold the tensors that `Form.stage` needs."""
        for part in sample.without_padding():
            reference = Reference.of(part, self.rows)
            add = partial(self.add_errors, reference, sample.layer)
            side_by_side(add, range(len(self.forms)), sample.keys.device)

    def add_errors(self, reference: Reference, layer: int, number: int) -> None:
        """Adds the errors of form `number`, for every bit width and factor, to the sums of `layer`."""
        form, total = self.forms[number], getattr(self, f"error_{number}")[layer]
        candidates = Candidates(form, getattr(reference, form.stream), self.ranges, layer)
        for row, bits in enumerate(self.bits):
            total[:, row] += self.errors(reference, candidates, bits).to(total.device)

    def errors(self, reference: Reference, candidates: Candidates, bits: int) -> Tensor:
        """Returns the errors of all factors on one sample at one bit width: float64 `[kv_heads, factors]`."""
        columns = range(len(self.factors))
        found: dict[int, Tensor] = {}
        last = least = torch.empty(0)
        for column in reversed(columns) if bits == 1 else columns:
            if not found or not bool((last > FAR * least).all()):
                last = reference.error(**{candidates.form.stream: candidates.at(bits, self.factors[column])})
                least = least.minimum(last) if found else last
            found[column] = last
        return torch.stack([found[column] for column in columns], -1)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the factors with the least error."""
        factors = torch.tensor(self.factors, dtype=torch.float32)
        return {
            f"{form.stream}.clip.{form.name}": factors[getattr(self, f"error_{number}").cpu().argmin(-1)]
            for number, form in enumerate(self.forms)
        }
