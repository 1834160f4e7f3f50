"""Tests that vLLM loads the scales of `calib export --format compressed-tensors` for its fp8 KV cache (docs/engines.md).

    python -m benchmarks.vllm_fp8 --artifact FILE [--prompts 16] [--folder runs/vllm_fp8] [--write]

New engines, one after another, are given the prompts of `engine_prompts.py`:

    16 bits                       the model
    fp8, scales of 1              the model with --kv-cache-dtype fp8
    fp8, a scale for each layer   the exported checkpoint, whose configuration alone turns --kv-cache-dtype auto into fp8
    fp8, a scale for each head    the same, exported with --granularity head

Before its numbers are shown, an engine is checked to hold the scales of the exported file, or 1.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.engine_prompts import MODEL, ROOT, Prompts
from calib.cli import main as calib

RESULT = ROOT / "benchmarks/results/vllm_fp8.json"
SCALES = "model-kv-scales.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, default=ROOT / "artifacts/tiny-llama.calib.safetensors")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/vllm_fp8")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()

    folder = asked.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's scales are in reach
    prompts, rows = Prompts(asked.prompts, folder), []
    for name, granularity, dtype in (
        ("16 bits", None, "auto"),
        ("fp8, scales of 1", None, "fp8"),
        ("fp8, a scale for each layer", "tensor", "auto"),
        ("fp8, a scale for each head", "head", "auto"),
    ):
        model = MODEL if granularity is None else exported(asked.artifact, granularity, folder)
        found = prompts.ask(name, model, max_num_seqs=4, kv_cache_dtype=dtype)
        if found["scales"] != (wanted := scales_of(model, found["scales"])):
            raise SystemExit(f"{name}: the engine holds the scales {found['scales']}, expected {wanted}; see {folder}")
        rows.append(prompts.row(name, found, 0) | {"scales": len(next(iter(found["scales"].values()))[0])})
        print(rows[-1], flush=True)
    if asked.write:
        RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def exported(artifact: Path, granularity: str, folder: Path) -> Path:
    """Returns the folder of a new checkpoint with calibrated scales."""
    output = folder / granularity
    words = f"export --format compressed-tensors --artifact {artifact} --model {MODEL} --granularity {granularity}"
    if status := calib([*words.split(), "--output", str(output), "--copy"]):
        raise SystemExit(status)
    return output


def scales_of(model: Path, layers: dict) -> dict[str, list[list[float]]]:
    """Returns the scales of keys and of values that a checkpoint has for an engine's attention `layers`, 1 if it has none."""
    if not (model / SCALES).exists():
        return {name: [[1.0], [1.0]] for name in layers}
    held = load_file(model / SCALES)
    stems = [name.removesuffix(".attn") for name in layers]
    if {f"{stem}.{part}_scale" for stem in stems for part in "kv"} != {*held}:
        raise SystemExit(f"the checkpoint has {sorted(held)}, the engine {sorted(layers)}")
    return {f"{stem}.attn": [held[f"{stem}.{part}_scale"].flatten().tolist() for part in "kv"] for stem in stems}


if __name__ == "__main__":
    main()
