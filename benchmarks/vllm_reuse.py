"""Tests that files of the KV connector for vLLM, written by one engine, are reused by others (docs/serve/vllm.md).

    python -m benchmarks.vllm_reuse --artifact FILE [--bits 2] [--prompts 16] [--folder runs/vllm] [--write]

New engines, one after another, are given the prompts of `engine_prompts.py`, three chunks of 256 tokens and a rest:

    computed          an empty folder, which the engine fills; 200 prompt tokens per step, so that steps end within chunks
    reused            all chunks are stored
    reused together   four requests at a time
    damaged           a byte of each prompt's second chunk is changed: the engine computes from there on, and stores it again
    two ranks         --tensor-parallel-size 2, with an empty folder, then again

Before its numbers are shown, each run is checked to have reused as many tokens as the row says; damaged files must have been
repaired. vLLM counts a prompt's tokens when it finds them stored; tokens that it could not load are reported in its log.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

from benchmarks.engine_prompts import ROOT, Prompts
from calib.runtime.storage import Codec, Header

RESULT = ROOT / "benchmarks/results/vllm_reuse.json"
CHUNK = 256  # tokens of a file
RESCHEDULED = re.compile(r"rescheduled \((\d+) tokens affected\)")  # in vLLM's log, for tokens that could not be loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, default=ROOT / "artifacts/tiny-llama.calib.safetensors")
    parser.add_argument("--bits", type=float, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/vllm")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()

    folder = asked.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts, store, split = Prompts(asked.prompts, folder), folder / "store", folder / "two ranks"
    chunks = len(prompts.ids[0]) // CHUNK

    def transfer(into: Path) -> dict:
        return {
            "kv_connector": "CalibConnector",
            "kv_connector_module_path": "calib.serve.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "artifact": str(asked.artifact.resolve()),
                "folder": str(into),
                "bits": asked.bits,
                "chunk": CHUNK,
            },
        }

    rows = []

    def run(name: str, into: Path, found: int, lost: int = 0, **arguments: int) -> None:
        row = prompts.row(
            name, prompts.ask(name, kv_transfer_config=transfer(into), **{"max_num_seqs": 1, **arguments}), found
        )
        log = (folder / f"{name}.engine.log").read_text()
        if sum(map(int, RESCHEDULED.findall(log))) != lost * asked.prompts:
            raise SystemExit(f"{name}: expected {lost} tokens a prompt that could not be loaded; see {folder}")
        files = files_of(into)
        size = sum(map(len, files.values()))
        row |= {
            "reused_tokens": found - lost,
            "files": len(files),
            "bytes_per_token": size / (asked.prompts * chunks * CHUNK),
        }
        rows.append(row)
        print(row, flush=True)

    run("computed", store, 0, max_num_batched_tokens=200)
    run("reused", store, chunks * CHUNK)
    run("reused together", store, chunks * CHUNK, max_num_seqs=4)
    whole = files_of(store)
    for file, blob in whole.items():
        if Header.read(blob).start == CHUNK:
            file.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    run("damaged", store, chunks * CHUNK, lost=(chunks - 1) * CHUNK)
    if {*files_of(store)} != {*whole}:
        raise SystemExit(f"damaged: files are missing; see {folder}")
    codec = Codec.from_artifact(asked.artifact, bits=asked.bits)
    for blob in files_of(store).values():
        codec.decode(blob)  # BlobError where one is damaged still
    run("two ranks, computed", split, 0, tensor_parallel_size=2)
    run("two ranks, reused", split, chunks * CHUNK, tensor_parallel_size=2)
    if asked.write:
        RESULT.write_text(json.dumps({"bits": asked.bits, "chunk_tokens": CHUNK, "rows": rows}, indent=1) + "\n")


def files_of(folder: Path) -> dict[Path, bytes]:
    """Returns the contents of all files of chunks."""
    return {file: file.read_bytes() for file in folder.glob("*/*.klt")}


if __name__ == "__main__":
    main()
