"""HTML bars of the loss of each group's dictionary before and after training."""

from collections.abc import Iterator, Sequence
from html import escape

from calib.artifact_view.groups import LOSSES, Group
from calib.layer_groups.grouping import in_words

LABELS = dict(zip(LOSSES, ("k-means", "trained"), strict=True))


def loss_bars(groups: Sequence[Group]) -> str:
    """Returns two bars for each group with figures, all on one scale from 0."""
    measured = [group for group in groups if group.figures]
    most = max((group.figures[name] for group in measured for name in LOSSES), default=0) or 1
    return "\n".join(['<div class="bars">', *(line for group in measured for line in bars(group, most)), "</div>"])


def bars(group: Group, most: float) -> Iterator[str]:
    """Yields the group's name and a bar of length `loss / most` for each loss, with the loss written beside it."""
    layers = f"layer{'s' * (len(group.layers) > 1)} {in_words(group.layers)}"
    yield f'<div class="name">{escape(group.name)}<small> {layers}</small></div>'
    for name in LOSSES:
        value = group.figures[name]
        yield (
            f'<div class="bar"><span class="label">{LABELS[name]}</span><span class="track">'
            f'<i class="{name}" style="width:{100 * value / most:.1f}%"></i></span>'
            f'<span class="loss">{value:.4f}</span></div>'
        )
