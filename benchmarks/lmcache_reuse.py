"""Tests that files of an LMCache server, plain and compressed, are reused by a new server and vLLM engine (docs/serve/lmcache.md).

    python -m benchmarks.lmcache_reuse --artifact FILE [--bits 2] [--prompts 16] [--folder runs/lmcache] [--write]

Three times a server and an engine are started, given the prompts, and ended:

    computed     empty stores; the server has two, plain files and those of serde calib, and fills both
    plain        reads only the plain files
    calib        reads only those of serde calib

Prompts are those of `engine_prompts.py`, seven chunks of 128 tokens and a rest. Before its numbers are shown, each run is checked
to have computed or reused tokens as the row says.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine_prompts import MODEL, ROOT, Prompts

RESULT = ROOT / "benchmarks/results/lmcache_reuse.json"
CHUNK = 128  # tokens; a block of vLLM's CPU attention
START = 120  # seconds that a server may take to start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, default=ROOT / "artifacts/tiny-llama.calib.safetensors")
    parser.add_argument("--bits", type=float, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/lmcache")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()

    folder = asked.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    stores = {name: folder / name for name in ("plain", "calib")}
    for path in stores.values():
        path.mkdir(parents=True)
    plain = {"type": "fs", "base_path": str(stores["plain"])}
    serde = {
        "type": "calib",
        "artifact": str(asked.artifact.resolve()),
        "model": str(MODEL),
        "bits": asked.bits,
        "cpu_block": CHUNK,
    }
    calib = {
        "type": "plugin",
        "module_path": "calib.serve.lmcache.plugin",
        "class_name": "FileAdapter",
        "adapter_params": {"base_path": str(stores["calib"])},
        "serde": serde,
    }
    prompts = Prompts(asked.prompts, folder)

    rows = []
    for name, adapters in (("computed", [plain, calib]), ("plain", [plain]), ("calib", [calib])):
        wanted = 0 if name == "computed" else CHUNK * (len(prompts.ids[0]) // CHUNK)
        row = prompts.row(name, asked_of(prompts, name, adapters), wanted)
        if name in stores:
            files = list(stores[name].glob("*.data"))
            row |= {
                "files": len(files),
                "bytes_per_token": sum(file.stat().st_size for file in files) / (len(files) * CHUNK),
            }
        rows.append(row)
        print(row, flush=True)
    if asked.write:
        RESULT.write_text(json.dumps({"bits": asked.bits, "chunk_tokens": CHUNK, "rows": rows}, indent=1) + "\n")


def asked_of(prompts: Prompts, name: str, adapters: list[dict]) -> dict:
    """Returns the answers of a new engine with a new server that has these stores, as `vllm_engine.py` writes them."""
    port, folder = free_port(), prompts.folder
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.port": port},
    }
    with server(port, folder / f"{name}.server.log", adapters) as running:
        found = prompts.ask(name, kv_transfer_config=transfer, max_num_seqs=1)
        settled(folder)
        if running.poll() is not None:
            raise SystemExit(f"the server ended; see {folder / name}.server.log")
    return found


@contextmanager
def server(port: int, log: Path, adapters: list[dict]) -> Iterator[subprocess.Popen]:
    """Context with a running LMCache server that answers at its HTTP port."""
    http = free_port()
    command = [Path(sys.executable).parent / "lmcache", "server", "--port", str(port), "--http-port", str(http)]
    command += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(CHUNK), "--l1-size-gb", "0.5"]
    command += ["--eviction-policy", "LRU", "--disable-observability"]
    for adapter in adapters:
        command += ["--l2-adapter", json.dumps(adapter)]
    with open(log, "w") as out:
        running = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            until = time.monotonic() + START
            while not answers_at(http):
                if running.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the LMCache server did not start; see {log}")
                time.sleep(0.5)
            yield running
        finally:
            running.terminate()
            running.wait()


def answers_at(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://localhost:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def settled(folder: Path) -> None:
    """Waits until no new file has appeared for three seconds, because a server stores after the answers."""
    before = None
    while (now := sorted(folder.glob("*/*"))) != before:
        before = now
        time.sleep(3)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    main()
