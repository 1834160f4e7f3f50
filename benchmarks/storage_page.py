"""Writes the tables of docs/serve/storage.md: quality by budget, and the link speeds below which coding is faster than 16 bits.

    python -m benchmarks.storage_page

Reads the runs of `storage_profile.py` and `storage_cpu.py` in `benchmarks/results` alone, and writes between the page's markers.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs/serve/storage.md"
MODEL = "smollm2-135m-instruct"
FORMS = {
    "Codec": "sized",
    "Codec, trellis": "trellis",
    "Codec, storage": "storage",
    "Codec, entropy": "entropy",
}  # of both runs
MODELS = {
    "wide": "2 layers, 8 KV heads of 128",
    "tiny-llama": "4 layers, 2 KV heads of 64",
    MODEL: "30 layers, 3 KV heads of 64",
}


def run(name: str) -> Any:
    """Returns the content of a file of `benchmarks/results`."""
    return json.loads((RESULTS / name).read_text())


def profile_table(model: str) -> list[str]:
    """Returns a table of KL, agreement and answers by profile, budget and text; no answers if the uncompressed model gives none."""
    found = run(f"storage_profile.{model}.json")
    texts = [text.split("=")[0] for text in found["text"]]
    told = "{:.2f}".format if found["exact_answers"] else lambda share: ""
    whole = f"{2 * found['values']:,}"
    lines = [
        f"| profile | `bits` | bytes a token (16 bits: {whole}) | KL: {', '.join(texts)} | same next token | right answers |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        sizes = {f"{size:,.0f}" for size in row["bytes_per_token"].values()}
        size = ", ".join(f"{row['bytes_per_token'][text]:,.0f}" for text in texts) if len(sizes) > 1 else sizes.pop()
        kl, same = (
            ", ".join(f"{row[name][text]:{form}}" for text in texts) for name, form in (("kl", ".4f"), ("same", ".2f"))
        )
        own = [f"`{FORMS[row['form']].replace('sized', 'heads')}`", f"{row['bits']:g}", size, kl, same]
        lines.append(f"| {' | '.join(own)} | {told(row['answers'])} |")
    return [*lines, f"| uncompressed | 16 | {whole} | 0 | 1 | {told(found['exact_answers'])} |"]


def break_even_table() -> list[str]:
    """Returns a table of times and link speeds by model."""
    lines = [
        "| KV shape | codes | bits | bytes a token (16 bits) | encode, MB/s | decode, MB/s | storing is faster below, Gbit/s "
        "| loading is faster below, Gbit/s | moving is faster below, Gbit/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in run("storage_cpu.json")["runs"].items():
        for row in found["rows"]:
            links = [f"{8 * speed / 1e3:.2f}" for speed in row["break_even_mb_per_second"].values()]
            speeds = [f"{row[f'{way}_mb_per_second']:.0f}" for way in ("encode", "decode")]
            size = f"{row['bytes_per_token']:,.0f} ({row['bytes_per_token_16_bits']:,.0f})"
            own = [MODELS[Path(name).name], f"`{row['forms']}`", f"{row['bits']:g}", size, *speeds, *links]
            lines.append(f"| {' | '.join(own)} |")
    return lines


def main() -> None:
    """Writes the tables into the page."""
    text = PAGE.read_text()
    for name, table in (
        ("profile", profile_table(MODEL)),
        ("embedded profile", profile_table("tiny-llama")),
        ("break-even", break_even_table()),
    ):
        begin, end = f"<!-- {name} table -->", f"<!-- end of {name} table -->"
        before, rest = text.split(begin)
        text = "\n".join([before + begin, *table, end + rest.split(end)[1]])
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
