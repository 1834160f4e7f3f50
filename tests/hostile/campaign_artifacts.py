"""A campaign of damaged artifacts: each is loaded, inspected and, where it is accepted, used.

    python tests/hostile/campaign_artifacts.py --cases 10000 --seed 0 --json campaign.json
    python tests/hostile/campaign_artifacts.py --seed 0 --case 4711        # repeats one case and prints how it ends

A case must be refused with one printable line of at most 400 characters, raised by this project's code, or be accepted with finite
logits. All other outcomes are counted as wrong: tracebacks, hangs (a time limit per case), too much memory, and NaN.
"""

import argparse
import contextlib
import io
import json
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # as in pytest's configuration
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from cases import BY_NAME, calibrated_artifact
from damaged_artifacts import Base, Damaged, damaged
from time_limit import TookTooLong, time_limit
from toy_models import random_model
from transformers import PreTrainedModel

from calib.cli import main
from calib.runtime import Artifact, compress

SECONDS = 30.0  # time limit of a case
MOST_GROWTH = 2**30  # bytes that a case may need in addition to the process's memory before it
LINE = 400  # most characters of a refusal, after the file's name
OURS = tuple(str(Path(__file__).resolve().parents[2] / folder) for folder in ("runtime", "calib", "kernels"))
TOKENS, STEPS = 48, 3

# Cases whose method reads a tensor, by the beginning of the tensor's name.
READERS = {
    "keys.low": ("kivi-2-calibrated", "rtn-4-calibrated", "zipcache-calibrated", "gear-calibrated"),
    "keys.high": ("kivi-2-calibrated", "rtn-1-calibrated"),
    "values.low": ("kivi-4-calibrated", "rtn-4-calibrated"),
    "values.high": ("kivi-2-calibrated", "rtn-1-calibrated"),
    "keys.clip": ("kivi-2-clipped", "rtn-4-clipped", "kivi-2-calibrated"),
    "values.clip": ("kivi-2-clipped", "rtn-4-clipped", "zipcache-calibrated"),
    "values.scale": ("zipcache-calibrated",),
    "keys.balancer": ("mikv-calibrated",),
    "keys.residual": ("gear-calibrated",),
    "values.residual": ("gear-calibrated",),
    "keys.klt": ("klt-short", "klt-after-rope", "klt-tiers", "klt-after-rope-tiers", "klt-loss"),
    "values.klt": ("klt-short", "klt-after-rope", "klt-tiers", "klt-loss"),
    "klt": ("klt-loss",),
    "keys": ("gear-calibrated", "mikv-corrected", "csr-offline", "csr-both"),
    "values": ("gear-calibrated", "mikv-corrected", "csr-offline", "csr-both"),
    "outliers": ("gear-calibrated", "mikv-corrected"),
    "tuned": ("tuned",),
    "": ("kivi-2-calibrated", "klt-short", "csr-offline", "mikv-calibrated"),
}


@dataclass
class Counts:
    """Number of cases by outcome; a wrong case counts for one of `tracebacks`, `hangs`, `over_memory` and `nan` only."""

    cases: int = 0
    refused: int = 0
    accepted: int = 0
    tracebacks: int = 0
    hangs: int = 0
    over_memory: int = 0
    nan: int = 0
    seed: int = 0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A summary in one line."""
        return (
            f"{self.cases} damaged artifacts (seed {self.seed}): {self.refused} refused in one line, {self.accepted} accepted with "
            f"finite logits; {self.tracebacks} tracebacks, {self.hangs} hangs, {self.over_memory} over the memory limit, "
            f"{self.nan} NaN"
        )


class Wrong(Exception):
    """A case had a wrong outcome; `kind` is the counter's name."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


@cache
def subject(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Base]:
    """A model in this dtype, and an undamaged artifact for it, which is the same for all dtypes."""
    model = random_model("llama", dtype)
    return model, Base.of(calibrated_artifact(random_model("llama")))


def run(number: int, seed: int, path: Path) -> str:
    """Run one case; return "refused" or "accepted", or raise `Wrong`."""
    draw = random.Random(f"{seed}/{number}/use")
    model, base = subject(draw.choice([torch.float32, torch.float32, torch.bfloat16]))
    case = damaged(base, seed, number)
    path.write_bytes(case.data)
    before = memory("VmRSS")
    try:
        with time_limit(SECONDS), address_space(2 * MOST_GROWTH):
            end = "accepted" if used(model, path, case, draw) else "refused"
    except TookTooLong as error:
        raise Wrong("hangs", f"{case.words}: {''.join(traceback.format_tb(error.__traceback__)[-3:])}") from error
    except MemoryError as error:
        raise Wrong("over_memory", f"{case.words}: MemoryError") from error
    if memory("VmHWM") - before > MOST_GROWTH:
        raise Wrong("over_memory", f"{case.words}: {(memory('VmHWM') - before) >> 20} MiB more")
    return end


def used(model: PreTrainedModel, path: Path, case: Damaged, draw: random.Random) -> bool:
    """Whether the file was accepted by loading, by `calib inspect` and by a method that reads the damaged tensor."""
    try:
        artifact = Artifact.load(path)
    except Exception as error:
        check_refusal(error, case, path)
        artifact = None
    form = draw.choice([[], [], ["--json"], ["--html", str(path.with_suffix(".html"))]])
    inspected(["inspect", str(path), *form], case, path, artifact is not None)
    if artifact is None:
        return False
    ends = [answers(model, artifact, name, case, draw) for name in draw.sample(readers(case), 1)]
    return all(ends)


def inspected(words: list[str], case: Damaged, path: Path, good: bool) -> None:
    """Check that `calib inspect` accepts or refuses the file as loading did (`good`), or refuses contents that loading does not
    read; a refusal is one line and status 2."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        status = main(words)
    if status == 0 and good:
        return
    lines = said.getvalue().splitlines()
    if status != 2 or len(lines) != 1 or "--debug shows the traceback" in lines[0]:
        raise Wrong("tracebacks", f"{case.words}: inspect ended with {status}: {said.getvalue()[-500:]}")
    check_line(lines[0].removeprefix("calib: error: "), case, path)


def answers(model: PreTrainedModel, artifact: Artifact, name: str, case: Damaged, draw: random.Random) -> bool:
    """Run a prompt of two rows and some decode steps with a method; return False if the artifact was refused."""
    if name == "tuned":
        method, options = case.names[1], {"tuned": 2.5}
    elif name == "klt-loss":
        method, options = "klt", {"loss": draw.choice([1e-3, 0.01, 0.1]), "window": 8, "block": 8}
    else:
        method, options = BY_NAME[name].method, BY_NAME[name].options
    try:
        held = compress(model, method, artifact=artifact, allow_finetuned=draw.random() < 0.5, **options)
    except Exception as error:
        check_refusal(error, case, None)
        return False
    tokens = torch.randint(2, 100, (2, TOKENS), generator=torch.Generator().manual_seed(draw.getrandbits(30)))
    try:
        with held, torch.no_grad():
            for step in [tokens, *(tokens[:, :1],) * STEPS]:
                if not bool(model(step, past_key_values=held).logits.isfinite().all()):
                    raise Wrong("nan", f"{case.words}: logits through {name}")
    except Wrong:
        raise
    except Exception as error:
        check_refusal(error, case, None)
        return False
    return True


def readers(case: Damaged) -> list[str]:
    """Names of cases whose method reads the first damaged tensor."""
    for name in case.names:
        return list(next(found for begins, found in READERS.items() if name.startswith(begins)))
    return list(READERS[""])


def check_refusal(error: Exception, case: Damaged, path: Path | None) -> None:
    """Raise `Wrong` unless the error is a ValueError that this project raised, with one line."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, ValueError) or not frames[-1].filename.startswith(OURS):
        if "alloc" in str(error) or isinstance(error, MemoryError):
            raise Wrong("over_memory", f"{case.words}: {error!r:.300}") from error
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        raise Wrong("tracebacks", f"{case.words}: {type(error).__name__} at {where}: {error!s:.300}") from error
    check_line(str(error), case, path)


def check_line(line: str, case: Damaged, path: Path | None) -> None:
    """Raise `Wrong` unless the message, without the path, is printable and has 1 to `LINE` characters."""
    line = line if path is None else line.removeprefix(f"{path}: ")
    if not line.isprintable() or not 0 < len(line) <= LINE:
        raise Wrong("tracebacks", f"{case.words}: a line of {len(line)} characters: {line[:500]!r}")


# ---- memory, as the kernel counts it


def memory(kind: str) -> int:
    """Memory of this process in bytes: `VmRSS`, resident now, `VmHWM`, the peak since `forget_peak`, or `VmSize`, address space; 0
    if the system does not tell it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), 0)


def forget_peak() -> None:
    """Reset the peak `VmHWM`, if the kernel allows it; otherwise the peak is that of all cases so far."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def address_space(more: int) -> Iterator[None]:
    """Limit the process's address space to `more` additional bytes: larger allocations fail at once, without harm to the
    machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = memory("VmSize")
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (min(size + more, hard) if hard >= 0 else size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def campaign(cases: int, seed: int, first: int = 0, seconds: float | None = None) -> Counts:
    """Run cases `first` ... `first + cases - 1` of a seed; stop early after `seconds`, or at Ctrl-C."""
    counts, began = Counts(seed=seed), time.monotonic()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "a.calib.safetensors"
        subject()
        for number in range(first, first + cases):
            if seconds is not None and time.monotonic() - began > seconds:
                break
            forget_peak()
            try:
                end = run(number, seed, path)
            except KeyboardInterrupt:  # keep the counts so far
                break
            except Wrong as wrong:
                counts.cases += 1
                setattr(counts, wrong.kind, getattr(counts, wrong.kind) + 1)
                counts.wrong.append(f"--seed {seed} --case {number}: {wrong}")
            else:
                counts.cases += 1
                setattr(counts, end, getattr(counts, end) + 1)
    return counts


def command() -> int:
    """Run the campaign from the command line; return status 1 if any case had a wrong outcome."""
    parser = argparse.ArgumentParser(description="Damaged artifacts: refused in one line, or used with finite logits.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--json", metavar="FILE", help="write the counts there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.case is not None:
        print(damaged(subject()[1], asked.seed, asked.case).words)
        asked.cases, asked.first = 1, asked.case
    counts = campaign(asked.cases, asked.seed, asked.first)
    for line in counts.wrong:
        print(line)
    print(counts.line())
    if asked.json:
        Path(asked.json).write_text(json.dumps(asdict(counts), indent=2) + "\n")
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(command())
