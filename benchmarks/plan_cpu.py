"""Compares `calib fit --plan` with the fit itself: bytes of files and caches, peak memory, seconds of every stage.

    python -m benchmarks.plan_cpu [--write]

Two fits on the CPU, each in a separate process and with a plan before and after it: the embedded model as in `make fit`, and
`wide`, two layers of random weights with 32 query and 8 KV heads of 128 channels. A stage's seconds are those between its
checkpoint and the one before; loading the model and making the corpus are not included. Memory is the process's peak from its first
stage on, minus what it held before that stage besides the weights. Caches: every method at its defaults, if the fitted artifact has
what it needs, after a prompt of 550 tokens in each of 2 rows. If other programs run meanwhile, the times of plans and fit differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.plan_page import PAGE, PASSIVE, printed, rewrite
from benchmarks.protocol import keep, load
from calib.bench.peak import Peak
from calib.capture.data import CaptureData
from calib.cli import main
from calib.documents.generators import keyed_lines, keyed_random
from calib.fit import command
from calib.fit.calibration import Calibration
from calib.runtime import Artifact, compress

RESULT = "plan_cpu.json"
EMBEDDED = Path(__file__).parents[1] / "artifacts/tiny-llama"
ROWS, CONTEXT = 2, 550
THREADS = 2
OUTPUT = "fitted.calib.safetensors"
RUN = Path("runs/fitted")
MODELS = ("embedded", "wide")
STAGES = ("statistics", "sensitivity", "clip", "evaluate", "dictionaries", "losses")
WIDE = [
    "--data.length=512", "--data.sequences=8", "--data.heldout_sequences=2", "--data.batch_size=2",
    "--model.clip_sequences=2", "--model.dictionary.atoms=64", "--model.dictionary.samples=8192",
    "--model.dictionary.heldout_samples=1024", "--model.dictionary.epochs=3", "--trainer.accelerator=cpu",
]  # fmt: skip


def words_of(name: str, folder: Path) -> list[str]:
    """Returns the options of a fit; the model and text of `wide` are written into `folder`."""
    shared = [f"--output={OUTPUT}", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    if name == "embedded":
        return ["--config=tiny.yaml", f"--model.path={EMBEDDED}", *shared]
    model, text = folder / "wide", folder / "text.txt"
    wide = load("wide")
    wide.resize_token_embeddings(len(AutoTokenizer.from_pretrained(EMBEDDED)), mean_resizing=False)
    wide.save_pretrained(model)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(model)
    documents = (keyed_lines(keyed_random("plan", number), lines=20, queries=4) for number in range(100))
    text.write_text("".join(piece.text for document in documents for piece in document))
    return [f"--model.path={model}", f"--data.text={text}", *WIDE, *shared]


def planned(words: list[str]) -> dict[str, Any]:
    """Returns the plan, made in a separate process."""
    child("fit", *words, "--plan", "--plan_json=plan.json", f"--plan_batch={ROWS}", f"--plan_context={CONTEXT}")
    return json.loads(Path("plan.json").read_text())


def child(*words: str) -> None:
    """Runs a command of `calib` in a process of this module, with OMP_WAIT_POLICY set, as torch is imported before `calib.cli`."""
    command = [sys.executable, "-m", "benchmarks.plan_cpu", "--child", *words]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**PASSIVE, "PYTHONPATH": str(EMBEDDED.parents[1])}
    )


def run_child(words: list[str]) -> None:
    """Runs the command in this process, and writes its peak memory from the first stage on, weights included, to grown.json."""
    torch.set_num_threads(THREADS)
    peak, stages = Peak(torch.device("cpu")), command.run_stages
    before = 0

    def counted(calibration: Calibration, data: CaptureData, *rest: Any) -> None:
        nonlocal before
        peak.settle()
        model, _, _ = data.load()
        before = (peak.held() or 0) - sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
        peak.begin()
        stages(calibration, data, *rest)

    command.run_stages = counted
    if main(words):
        raise SystemExit(1)
    Path("grown.json").write_text(json.dumps((peak.highest() or 0) - before))


def served(plan: dict[str, Any]) -> list[str]:
    """Returns the methods whose tensors the fitted artifact has; a plan says of the others why they are refused."""
    return [name for name, planned in plan["cache"]["methods"].items() if "refused" not in planned]


def measured_caches(model: Path, methods: list[str]) -> dict[str, dict[str, int]]:
    """Returns the bytes of the cache of each of these methods, summed over its tensors."""
    lm, artifact, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), Artifact.load(OUTPUT), {}
    prompt = torch.randint(3, 2000, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(0))
    for name in methods:
        with compress(lm, name, artifact=artifact) as cache, torch.no_grad():
            lm(prompt, past_key_values=cache, logits_to_keep=1)
            weight = cache.memory()
        found[name] = {"device_bytes": weight.measured_bytes, "host_bytes": weight.host_bytes}
    return found


def measure(name: str) -> dict[str, Any]:
    """Returns planned and measured figures of a fit."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        words = words_of(name, Path(folder))
        before = planned(words)
        child("fit", *words)
        grown, after = json.loads(Path("grown.json").read_text()), planned(words)
        model = next(Path(word.partition("=")[2]) for word in words if word.startswith("--model.path="))
        files = [RUN / "config.yaml", *(RUN / f"{stage}.ckpt" for stage in STAGES[:-1]), Path(OUTPUT)]
        ends = [file.stat().st_mtime for file in files]
        taken = {stage: end - start for stage, start, end in zip(STAGES, ends, ends[1:], strict=False)}
        caches = measured_caches(model, served(before))
        checkpoint, artifact = (RUN / "evaluate.ckpt").stat().st_size, Path(OUTPUT).stat().st_size
        os.chdir("/")
    seconds = [stages_of(plan) for plan in (before, after)]
    planned_caches = before["cache"]["methods"]
    return {
        "artifact_bytes": pair(before["artifact"]["bytes"], artifact),
        "checkpoint_bytes": pair(before["statistics"]["bytes"], checkpoint),
        "host_bytes": pair(max(one["host"] for one in before["memory"]["stages"]), grown),
        "cache_bytes": {
            method: {kind: pair(planned_caches[method][kind], size) for kind, size in kinds.items() if size}
            for method, kinds in caches.items()
        },
        "seconds": {
            **{one: pair([plan[one] for plan in seconds], round(taken[one], 2)) for one in STAGES},
            "all": pair([sum(plan.values()) for plan in seconds], round(sum(taken.values()), 2)),
        },
    }


def stages_of(plan: dict[str, Any]) -> dict[str, float]:
    """Returns the planned seconds by stage, with the time of writing its checkpoints included."""
    stages, saves = dict(plan["seconds"]["stages"]), {one["stage"]: one["checkpoints"] for one in plan["passes"]}
    writing, grouping = stages.pop("checkpoints"), stages.pop("layer groups")
    for one, count in saves.items():
        stages[one] += writing * count / sum(saves.values())
    stages["dictionaries"] += grouping
    return stages


def pair(told: float | list[float], found: float) -> dict[str, Any]:
    """Returns planned figures (for times before and after the fit), the measured one, and planned over measured."""
    many = told if isinstance(told, list) else [told]
    return {"planned": [round(x, 2) for x in many], "measured": found, "ratio": [round(x / found, 3) for x in many]}


def table(run: dict[str, Any]) -> list[str]:
    """Returns the run as a Markdown table, with planned over measured figures."""
    rows = ["| figure | planned | measured | planned / measured |", "|---|---|---|---|"]
    for name, found in run.items():
        for kind in ("artifact_bytes", "checkpoint_bytes", "host_bytes"):
            rows.append(line(f"{name}, {kind.replace('_', ' ')}", found[kind], ",.0f"))
        shares = [one["ratio"][0] for kinds in found["cache_bytes"].values() for one in kinds.values()]
        rows.append(
            f"| {name}, bytes of the caches of {len(found['cache_bytes'])} methods | | | {min(shares):.3f} ... {max(shares):.3f} |"
        )
        rows += [line(f"{name}, seconds, {stage}", one, ".1f") for stage, one in found["seconds"].items()]
    return rows


def line(name: str, one: dict[str, Any], form: str) -> str:
    """Returns a row of the table; for times with both plans."""
    told = " and ".join(f"{x:{form}}" for x in one["planned"])
    return f"| {name} | {told} | {one['measured']:{form}} | {' and '.join(f'{x:.2f}' for x in one['ratio'])} |"


def run() -> None:
    """Measures and prints; with --write keeps the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT} and {PAGE.name}"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="only these; not with --write")
    asked = parser.parse_args()
    if asked.write and {*asked.models} != {*MODELS}:
        parser.error(f"--write replaces the whole record; leave out --models {' '.join(asked.models)}")
    found = {name: measure(name) for name in MODELS if name in asked.models}
    print("\n".join(table(found)))
    if asked.write:
        keep(RESULT, {"models": found})
        rewrite("plan table", table(found))
        rewrite("example", printed(["fit", "--config=tiny.yaml", "--plan"], THREADS))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(sys.argv[2:])
    else:
        run()
