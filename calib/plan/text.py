"""The plan of a fit as text, with tables for a terminal."""

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calib.bench.byte_sizes import spoken_size
from calib.layer_groups.grouping import in_words

WIDTH = 120
TIME = "Time"  # first word of the only paragraph that depends on the machine


def plan_text(plan: dict[str, Any]) -> str:
    """Returns the whole plan as paragraphs separated by empty lines; only the paragraph on time depends on the machine."""
    parts = [about(plan), captured(plan), dictionaries(plan), memory(plan), disk(plan), times(plan), caches(plan)]
    return "\n\n".join(part for part in parts if part)


def about(plan: dict[str, Any]) -> str:
    """Sentences on the model and the corpus."""
    corpus = plan["corpus"]
    shared = f", in {corpus['processes']} processes" if corpus["processes"] > 1 else ""
    return "\n".join(
        wrapped(sentence)
        for sentence in (
            "Plan of a fit; no weight was loaded and no text read.",
            model_sentence(plan["model"]),
            f"Corpus {corpus['name']}: {corpus['train']} sequences to measure and {corpus['heldout']} held out, at most, of "
            f"{corpus['length']} tokens ({corpus['tokens']:,} in all), batch size {corpus['batch']}{shared}.",
        )
    )


def model_sentence(model: dict[str, Any]) -> str:
    """Sentence on the model's sizes, its sliding-window layers and the layers that caches compress."""
    sliding = [number for number, window in enumerate(model["windows"]) if window is not None]
    slide = f"layers {in_words(sliding)} slide" if sliding else "every layer attends to all tokens"
    left = [number for number in range(model["layers"]) if number not in model["compressed"]]
    kept = f"caches leave layers {in_words(left)} as they are" if left else "caches compress every layer"
    spread = f", spread by device_map {model['device_map']}" if model.get("device_map") else ""
    return (
        f"Model {model['path']} ({model['architecture']}): {model['parameters'] / 1e6:,.1f} million parameters in "
        f"{model['dtype']}, {spoken_size(model['weights_bytes'])}{spread}; {model['layers']} layers, {model['heads']} query "
        f"heads, {model['kv_heads']} KV heads of {model['head_dim']} channels; {slide}; {kept}."
    )


def captured(plan: dict[str, Any]) -> str:
    """Tables of the passes over the corpus and of the statistics that they fill."""
    stages = [
        [one["stage"], one["part"], f"{one['sequences']:,}", f"{one['batches']:,}", f"{one['checkpoints']:,}"]
        for one in plan["passes"]
    ]
    first = drawn("Passes over the corpus", "stage,reads,sequences,batches,checkpoints", stages, words=2)
    stage_of = {name: one["stage"] for one in plan["passes"] for name in one["statistics"]}
    rows = []
    for name, one in plan["statistics"]["each"].items():
        rows.append([name, stage_of[name], shapes(one["tensors"]), spoken_size(one["bytes"])])
    rows.append(["all", "", "", spoken_size(plan["statistics"]["bytes"])])
    return (
        first
        + "\n\n"
        + drawn("Statistics in memory during the fit, all layers", "name,stage,tensors,size", rows, words=3)
    )


def shapes(tensors: Sequence[dict[str, Any]]) -> str:
    """Lines such as `2 x float32 [4, 2, 64]`; scalars are left out."""
    told = [f"{one['count']} x {one['dtype']} [{', '.join(map(str, one['shape']))}]" for one in tensors if one["shape"]]
    return "\n".join(told)


def dictionaries(plan: dict[str, Any]) -> str:
    """Table of the dictionaries that are trained, or a sentence that there are none."""
    found = plan["dictionaries"]
    if found is None:
        return "No dictionaries."
    rows = [
        [stream, *(f"{one[name]:,}" for name in ("groups", "atoms", "channels", "pairs", "vectors", "steps"))]
        for stream, one in found["streams"].items()
    ]
    title = (
        f"Dictionaries, at most: groups of layers by '{found['chosen']}', {found['epochs']} epochs in steps of "
        f"{found['batch_size']} vectors"
    )
    return drawn(title, "stream,groups,atoms of each,channels,pairs,vectors,steps", rows)


def memory(plan: dict[str, Any]) -> str:
    """Table of the peak memory of every stage, with the highest one in its title."""
    found = plan["memory"]
    names = ("device", "host") if found["gpu"] else ("host",)
    rows = [[one["stage"], *(spoken_size(one[name]) for name in names)] for one in found["stages"]]
    highest = (max(found["stages"], key=lambda one: one[name]) for name in names)
    most = "; ".join(
        f"{name} {spoken_size(one[name])} in '{one['stage']}'" for name, one in zip(names, highest, strict=True)
    )
    title = f"Peak memory of all tensors: {most}. Python and its libraries are not included."
    return drawn(title, ",".join(("stage", *names)), rows)


def disk(plan: dict[str, Any]) -> str:
    """Sentence on the disk space of checkpoints and the artifact."""
    found = plan["disk"]
    return wrapped(
        f"Disk: {spoken_size(found['total'])}, of which checkpoints take {spoken_size(found['statistics_checkpoints'])} and "
        f"{spoken_size(found['written_beside'])} more while one is written, dictionaries "
        f"{spoken_size(found['dictionaries_checkpoint'])}, the artifact {spoken_size(found['artifact'])} and the logger's copy "
        f"of it as much. The artifact has {len(plan['artifact']['tensors'])} tensors of {plan['artifact']['bytes']:,} bytes in "
        "all; fewer if layers share dictionaries."
    )


def times(plan: dict[str, Any]) -> str:
    """Table of the predicted seconds of every stage, with a description of the timed pieces."""
    tokens = plan["seconds"]["pace"]["tokens"]
    return stage_times(
        plan["seconds"],
        f"one layer over {tokens} random tokens, and steps of one dictionary of each stream. Loading the model, downloads, and "
        "reading or sampling the corpus are not included.",
        "the fit takes less",
    )


def stage_times(found: dict[str, Any], pieces: str, without: str, heading: str = "stage") -> str:
    """Table of the seconds of every stage.

    Args:
        found: the plan's `seconds`.
        pieces: description of the pieces of work that were timed.
        without: end of the sentence that says what happens without other processes on the machine.
        heading: heading of the first column.
    """
    rows = [[name, spoken_time(seconds)] for name, seconds in found["stages"].items()]
    rows.append(["all", spoken_time(found["total"])])
    least, most = map(spoken_time, found["range"])
    title = (
        f"{TIME}: {least} to {most}. The extrapolation is {spoken_time(found['total'])}, from {found['timed_for']:.1f} s of work "
        f"on {found['device']} with {found['threads']} threads: {pieces}"
    )
    if found["busy"]:
        title += (
            f" The machine was busy: other processes used {found['neighbours']:.0%} of its processors during the "
            f"measurement, and without them {without}."
        )
    return drawn(title, f"{heading},time", rows)


def caches(plan: dict[str, Any]) -> str:
    """Table of every method's cache at its default options."""
    found = plan["cache"]
    exact = found["exact_16_bit_bytes"]
    rows, refused = [["16 bits", spoken_size(exact), "", "16.00", "1.00"]], []
    for name, one in found["methods"].items():
        if "refused" in one:
            refused.append(f"{name}: {one['refused']}")
            continue
        device, host = one["device_bytes"], one["host_bytes"]
        share = f"{device / exact:.2f}"
        rows.append(
            [name, spoken_size(device), spoken_size(host) if host else "", f"{one['bits_per_value']:.2f}", share]
        )
    title = (
        f"Caches of {found['batch']} x {found['context']:,} tokens, every method with its default options and this artifact, "
        "compared with 16 bits per value"
    )
    headings = "method,device,host,bits per value,share of 16 bits"
    return "\n".join([drawn(title, headings, rows), *(f"Refused: {line}" for line in refused)])


def drawn(title: str, headings: str, rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Draws a table below its title; the first `words` columns are left-aligned text, the others right-aligned numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings.split(",")):
        table.add_column(heading, justify="left" if number < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # names are the user's: `kivi [2 bits]` is no mark-up of rich's
    page = io.StringIO()
    Console(file=page, width=WIDTH, highlight=False, color_system=None).print(table)
    return "\n".join([wrapped(title), *(line.rstrip() for line in page.getvalue().splitlines() if line.strip())])


def wrapped(text: str) -> str:
    """Wraps a text at `WIDTH` characters."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def spoken_time(seconds: float) -> str:
    """`1 h 40 min`, `2 min 5 s` or `3.1 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
