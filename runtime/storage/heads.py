"""The coding of some of a layer's KV heads, those of one rank of tensor parallelism.

Every table of a stage has one entry for each head, and a head's coding does not depend on the others. Components are in plane form
(`kernels/pack/heads.py`): p W + w, W being the largest number of words of a head. Fewer heads may have a smaller W.
"""

from dataclasses import replace

import torch
from torch import Tensor

from calib.runtime.messages.printable import printable
from calib.runtime.stages.codec import MixedQuant, Sized, TrellisQuant
from calib.runtime.stages.prediction import Prediction
from calib.runtime.stages.transform import Basis
from calib.runtime.tiered.tier_plan import TierPlan, TierStages


def heads_of(heads: range | slice | None, count: int) -> range:
    """Returns the chosen KV heads of `count` as a range; raises ValueError if there are none, or if they have gaps."""
    if heads is None:
        return range(count)
    if isinstance(heads, slice):
        ends = (0 if heads.start is None else heads.start, count if heads.stop is None else heads.stop, heads.step)
        whole = all(type(end) is int for end in ends[:2])
        found = range(ends[0], ends[1]) if whole and ends[2] in (None, 1) else None
    else:
        found = heads if isinstance(heads, range) and heads.step == 1 else None
    if found is None or not 0 <= found.start < found.stop <= count:
        raise ValueError(f"heads must be a range without gaps within 0 ... {count}, got {printable(heads)}")
    return found


def of_heads(plan: TierPlan, heads: range) -> TierPlan:
    """Returns the `plan` of `klt` for these KV heads alone, in the same order."""
    keys, values = (_stages_of(stages, heads) for stages in (plan.keys, plan.values))
    predicted = plan.prediction
    if predicted is not None:
        columns, own = _columns(codes_of(plan.keys), heads), slice(heads.start, heads.stop)
        predicted = Prediction(predicted.table[own][:, columns], predicted.unit[own])
    return replace(plan, keys=keys, values=values, prediction=predicted)


def codes_of(stages: TierStages) -> MixedQuant | TrellisQuant:
    """The codec of components, sized or not."""
    codec = stages.codec.codec if isinstance(stages.codec, Sized) else stages.codec
    assert isinstance(codec, MixedQuant | TrellisQuant)
    return codec


def _stages_of(stages: TierStages, heads: range) -> TierStages:
    assert isinstance(stages.transform, Basis)
    basis, codes, own = stages.transform, codes_of(stages), slice(heads.start, heads.stop)
    columns = _columns(codes, heads)
    found = replace(
        basis,
        mean=basis.mean[own],
        unit=basis.unit[own],
        into=basis.into[own][..., columns],
        scale=basis.scale[own][..., columns],
        back=basis.back[own][:, columns],
        size=basis.size[own],
        gain=basis.gain[own][..., columns],
        origin=basis.origin[own],
    )
    codec = replace(codes, counts=codes.counts[own])
    if isinstance(codec, TrellisQuant):
        codec = replace(codec, weights=codec.weights[own][..., columns])
    if isinstance(stages.codec, Sized):
        return TierStages(found, replace(stages.codec, codec=codec, weights=stages.codec.weights[own][..., columns]))
    return TierStages(found, codec)


def _columns(codes: MixedQuant | TrellisQuant, heads: range) -> Tensor:
    """Indices, among the components of all heads in plane form, of those that `heads` have in their own plane form."""
    every = torch.arange(codes.components).unflatten(0, (len(codes.widths), max(codes.counts)))
    return every[:, : max(codes.counts[heads.start : heads.stop])].flatten()
