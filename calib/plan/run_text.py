"""The plan of an evaluation or a bench as text, in the style of a fit's plan (`text.py`)."""

from collections.abc import Sequence
from typing import Any

from calib.bench.byte_sizes import spoken_size
from calib.plan.text import TIME, drawn, model_sentence, stage_times, wrapped

AT_MOST = "<= "  # sizes of transformers' quantized caches are not predicted; the exact cache is their upper bound
NOT_IN_TIME = (
    "forwards of one layer with random weights, multiplied by layers and tokens. Not included: the time that methods add or save, "
    "loading, downloads, sampling text, checking and writing."
)


def run_text(plan: dict[str, Any]) -> str:
    """Returns the whole plan as text; only the paragraph on time depends on the machine."""
    parts = of_evaluation(plan) if plan["kind"] == "evaluation" else of_bench(plan)
    return "\n\n".join([*parts, disk(plan), times(plan)])


def of_evaluation(plan: dict[str, Any]) -> list[str]:
    """Paragraphs of an evaluation's plan: model, columns, memory, caches."""
    about = [f"Plan of the evaluation '{plan['name']}'; no weight was loaded.", model_sentence(plan["model"])]
    if plan["no_tokenizer"] is not None:
        about.append(
            f"The model's tokenizer is not available ({plan['no_tokenizer']}): tokens are counted with the embedded model's, which "
            "gives more tokens for the same text."
        )
    return ["\n".join(map(wrapped, about)), columns(plan), memory(plan), caches(plan)]


def columns(plan: dict[str, Any]) -> str:
    """Table of the columns: methods, rows, tokens and forwards of each."""
    rows = [
        [
            one["title"],
            one["task"],
            str(one["methods"]),
            f"{one['rows']:,}",
            f"{one['prompt']:,.0f}",
            f"{one['tokens_of_a_row']:,.0f}",
            f"{one['forwards']:,}",
            f"{one['tokens']:,}",
        ]
        for one in plan["columns"]
    ]
    tokens = sum(one["tokens"] for one in plan["columns"])
    title = (
        f"{plan['cells']} cells, {tokens:,} tokens through the model, batch size {plan['batch_size']}. Forwards are those of one "
        "method. Cells that are already finished are counted as well."
    )
    return drawn(title, "column,task,methods,rows,prompt tokens,tokens per row,forwards,tokens in all", rows, words=2)


def memory(plan: dict[str, Any]) -> str:
    """Sentence on the peak memory and its parts."""
    found = plan["memory"]
    most, weights = found["most"], spoken_size(found["weights"])
    if most is None:
        return wrapped(f"Memory: weights {weights}; no row has a cache that can be predicted.")
    kept = f", {spoken_size(found['kept'])} of the full cache's answers kept on the host" if found["kept"] else ""
    return wrapped(
        f"Peak memory of all tensors: {both(found, most)}, by '{most['row']}' on '{most['column']}': weights {weights}, "
        f"cache {spoken_size(most['cache'])}, activations and logits {spoken_size(most['beside'])}{kept}. Python and its "
        "libraries are not included."
    )


def both(found: dict[str, Any], size: dict[str, int]) -> str:
    """`device 1.00 GiB and host 2.00 GiB`, or the host part only if there is no GPU."""
    host = f"host {spoken_size(size['host'])}"
    return f"device {spoken_size(size['device'])} and {host}" if found["gpu"] else host


def caches(plan: dict[str, Any]) -> str:
    """Table of the largest cache of every row."""
    rows, refused = [], []
    for one in plan["caches"]:
        if "refused" in one:
            refused.append(f"Refused: {one['name']}: {one['refused']}")
            continue
        rows.append([one["name"], one["column"], f"{one['batch']} x {one['tokens']:,}", *sizes(one)])
    title = "Caches: the largest one of every method, as if all rows of a batch were as long as the longest"
    return "\n".join([drawn(title, "row,column,tokens,device,host,bits per value", rows, words=2), *refused])


def sizes(one: dict[str, Any]) -> list[str]:
    """Table cells of a cache: device bytes, host bytes, bits per value."""
    sign = AT_MOST if one["at_most"] else ""
    host = spoken_size(one["host_bytes"]) if one["host_bytes"] else ""
    return [f"{sign}{spoken_size(one['device_bytes'])}", host, f"{sign}{one['bits_per_value']:.2f}"]


def of_bench(plan: dict[str, Any]) -> list[str]:
    """Paragraphs of a bench's plan: model, memory, caches of every cell, largest batches."""
    rows, cells = list(plan["cells"][0]["rows"]), plan["cells"]
    about = [
        f"Plan of the bench '{plan['name']}'; no weight was loaded.",
        model_sentence(plan["model"]),
        f"{len(rows)} rows over {len(cells)} batches and contexts, {plan['new_tokens']} new tokens each in {plan['turns']} turns.",
    ]
    parts = ["\n".join(map(wrapped, about)), bench_memory(plan)]
    refused = dict[str, str]()
    for cell in cells:
        lines = []
        for name, one in cell["rows"].items():
            if "refused" in one:
                refused[name] = one["refused"]
            else:
                lines.append([name, *sizes(one)])
        parts.append(drawn(f"Caches, {cell['batch']} x {cell['context']:,} tokens", HEADINGS, lines))
    parts += ["\n".join(f"Refused: {name}: {why}" for name, why in refused.items())] if refused else []
    return [*parts, *([largest(plan)] if plan["limit"] is not None else [])]


HEADINGS = "row,device,host,bits per value"


def bench_memory(plan: dict[str, Any]) -> str:
    """Table of the peak memory of every cell: with all caches together, as while new tokens are timed, or the largest alone."""
    found, rows = plan["memory"], list[Sequence[str]]()
    names = ("device", "host") if found["gpu"] else ("host",)
    for cell in plan["cells"]:
        lines = [cell["together"], cell["alone"]]
        told = ["" if one is None else spoken_size(one[name]) for one in lines for name in names]
        rows.append([f"{cell['batch']} x {cell['context']:,}", spoken_size(cell["beside"]), *told])
    title = (
        f"Peak memory of all tensors, with weights of {spoken_size(found['weights'])}: 'together' with the caches of all methods, "
        "as while new tokens are timed; 'alone' with the largest cache only, the least that is needed if they do not fit together. "
        "Python and its libraries are not included."
    )
    headings = [f"{what}{'' if len(names) == 1 else ' ' + name}" for what in ("together", "alone") for name in names]
    return drawn(title, ",".join(("tokens", "activations", *headings)), rows)


def largest(plan: dict[str, Any]) -> str:
    """Table of the largest batches that fit into the memory limit."""
    rows = [
        [
            one["name"],
            f"{one['context']:,}",
            f"{'>= ' if one['at_most'] else ''}{one['batch']:,}",
            spoken_size(one["fixed"]),
            spoken_size(one["per_row"]),
        ]
        for one in plan["largest"]
    ]
    title = f"Largest batch in {spoken_size(plan['limit'])}, weights, cache and activations counted"
    return drawn(title, "row,context,batch,fixed,per batch row", rows)


def disk(plan: dict[str, Any]) -> str:
    """Sentence on the disk space of the files that a run leaves."""
    found = plan["disk"]
    what = "one file for each finished cell and three reports" if plan["kind"] == "evaluation" else "three reports"
    return wrapped(
        f"Disk: about {spoken_size(found['total'])}, {what}, of {found['cells']} cells; copies of the logger and of the hub are "
        "not included."
    )


def times(plan: dict[str, Any]) -> str:
    """Paragraph on time: by column of an evaluation, or by part of a bench."""
    if plan["seconds"] is None:
        return wrapped(
            f"{TIME}: not predicted, because this machine has no such device on which pieces of the work could be timed."
        )
    heading = "column" if plan["kind"] == "evaluation" else "part"
    return stage_times(plan["seconds"], NOT_IN_TIME, "it takes less", heading)
