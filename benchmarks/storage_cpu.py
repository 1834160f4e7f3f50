"""Measures stored chunks on a CPU: time to encode and decode, bytes per token, and the link speed below which coding is faster.

    python -m benchmarks.storage_cpu [--model wide artifacts/tiny-llama SMOLLM2] [--tokens 256] [--bits 3 2 1.5 1] [--write]

SMOLLM2 is the folder that `make smollm2-model` writes. One process, one thread, turn by turn (`protocol.py`), with an A/A pair;
`clone` copies the chunk: the cost of memory alone. Chunks are bfloat16 noise of all layers; bases are random (`bases.py`), so times
are as with a fit, but errors are not. `plain` codes components alone, `sized` also has sizes of tokens and predictions of values,
`trellis` also trellis-coded levels; `storage` is the profile with joint bases and prediction between layers, `entropy` the same
with an entropy coder.

Before anything is timed, chunks are checked: coded in two pieces they decode to the same bits, and more bits give a smaller error.

A link of s bytes per second moves a chunk of B bytes in B / s, and its code of b bytes in b / s. So coding is faster below

    s = (B - b) / t        t: seconds to encode (to fill a store), to decode (to read it), or both (between machines),

if nothing of t overlaps with the transfer or with the engine's own work.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.bases import made_up
from benchmarks.protocol import keep, load, show, turn_by_turn
from calib.runtime import Artifact, Codec

RESULT = "storage_cpu.json"
START = 1000  # first position of the chunk, chosen arbitrarily
FORMS: dict[str, dict[str, object]] = {
    "plain": {"size": False},
    "sized": {"size": True, "predict": True},
    "trellis": {"size": True, "predict": True, "trellis": True},
    "storage": {"profile": "storage"},
    "entropy": {"profile": "storage", "entropy": True},
}
RATIOS = {
    "encode again / encode (A/A)": ("encode again", "encode"),
    "encode / clone": ("encode", "clone"),
    "decode / clone": ("decode", "clone"),
}


def checked(codec: Codec, chunk: Tensor) -> float:
    """Returns the relative error of a decoded chunk; raises SystemExit if two pieces decode to other bits."""
    found = codec.decode(codec.encode(chunk, START))
    half = chunk.shape[2] // 2
    parts = [
        codec.decode(codec.encode(part, at))
        for part, at in ((chunk[:, :, :half], START), (chunk[:, :, half:], START + half))
    ]
    if not torch.equal(torch.cat(parts, 2), found):
        raise SystemExit("a chunk in two pieces decodes to other bits")
    return float((found.float() - chunk.float()).norm() / chunk.float().norm())


def steps(codec: Codec, chunk: Tensor) -> dict[str, Callable[[], object]]:
    """Returns the timed steps."""
    blob, out = codec.encode(chunk, START), torch.empty_like(chunk)
    return {
        "encode": lambda: codec.encode(chunk, START),
        "encode again": lambda: codec.encode(chunk, START),
        "decode": lambda: codec.decode(blob, out=out),
        "clone": lambda: out.copy_(chunk),
    }


def measure(artifact: Artifact, chunk: Tensor, bits: list[float], turns: int) -> list[dict[str, object]]:
    """Returns a row for each form and budget."""
    rows = list[dict[str, object]]()
    for form, options in FORMS.items():
        nearest = 0.0
        for budget in sorted(bits, reverse=True):
            codec = Codec.from_artifact(artifact, bits=budget, **options)
            error = checked(codec, chunk)
            if error <= nearest:
                raise SystemExit(f"{form}: {budget} bits err by {error:.3f}, and more bits by {nearest:.3f}")
            nearest, tokens = error, chunk.shape[2]
            own = steps(codec, chunk)
            run = turn_by_turn(lambda _, own=own: own, turns, RATIOS)
            show(run, f"{form}, {budget} bits: ")
            encode, decode = (run["milliseconds"][name][1] / 1e3 for name in ("encode", "decode"))
            whole, coded = chunk.numel() * chunk.element_size(), len(codec.encode(chunk, START))
            row = {
                "forms": form,
                "bits": budget,
                "bytes_per_token": coded / tokens,
                "bytes_per_token_16_bits": whole / tokens,
                "relative_error": error,
                "encode_mb_per_second": whole / encode / 1e6,
                "decode_mb_per_second": whole / decode / 1e6,
                "break_even_mb_per_second": {
                    "store": (whole - coded) / encode / 1e6,
                    "load": (whole - coded) / decode / 1e6,
                    "move": (whole - coded) / (encode + decode) / 1e6,
                },
            }
            print({name: row[name] for name in list(row)[2:]})
            rows.append({**row, **run})
    return rows


@torch.no_grad()
def main() -> None:
    """Measures and prints; with --write saves the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["wide", "artifacts/tiny-llama"])
    parser.add_argument("--tokens", type=int, default=256, help="of a chunk; 256 is LMCache's")
    parser.add_argument("--bits", type=float, nargs="+", default=[3, 2, 1.5, 1])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    runs = {}
    for name in asked.model:
        model = load(name)
        artifact, found = made_up(model, sized=True, storage=True), model.config
        width = found.num_key_value_heads * found.head_dim
        draw = torch.Generator().manual_seed(0)
        chunk = torch.randn(2, found.num_hidden_layers, asked.tokens, width, generator=draw).bfloat16()
        print(f"{name}: {tuple(chunk.shape)}")
        runs[Path(name).name] = {
            "shape": list(chunk.shape),
            "rows": measure(artifact, chunk, asked.bits, asked.turns),
        }
    if asked.write:
        keep(RESULT, {"dtype": "bfloat16", "tokens": asked.tokens, "turns": asked.turns, "runs": runs})


if __name__ == "__main__":
    main()
