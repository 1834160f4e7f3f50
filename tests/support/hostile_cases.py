"""Shared by campaigns of damaged files: one case within limits, counts of many cases, and the command line.

A case is reproduced by its seed and number. It must be refused with the expected error in one line, or be accepted and give finite
numbers, within a time limit and in memory of a small multiple of the file.
"""

import argparse
import json
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch

SECONDS = 20  # for one file: loading it and the steps after that
LONGEST = 400  # characters of a refusal
# Allowed address space: bytes for loading and steps of a toy model whatever the file (arenas of threads, tables), and a multiple of
# the file's size.
SLACK, TIMES = 96 * 2**20, 24
OUTCOMES = ("refused", "accepted", "tracebacks", "hangs", "over_memory", "nan")


class TimeIsUpError(BaseException):
    """A file took longer than SECONDS; a BaseException, so that `except Exception` does not catch it."""


@dataclass(frozen=True)
class Done:
    """A finished case: the base that it was made `of`, the changes `done` to it, its outcome (`kind`, "refused", "accepted" or
    another of OUTCOMES), and the message or traceback."""

    of: str
    done: str
    kind: str
    told: str


def limited(
    use: Callable[[], tuple[str, str]], size: int, refusal: type[ValueError], begins: str = "", times: int = TIMES
) -> tuple[str, str]:
    """Return the result of `use`: "accepted" or "nan", and words. If it raises, takes longer than SECONDS, or more memory than
    SLACK + `times` x `size` bytes, return another of OUTCOMES. A `refusal` counts as "refused" if it is one printable line of up to
    LONGEST characters that begins with `begins`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SLACK + times * size, limits[1]))
    signal.alarm(SECONDS)
    try:
        return use()
    except refusal as error:
        text = str(error)
        if len(text) <= LONGEST and text.isprintable() and text.startswith(begins):
            return "refused", text
        return "tracebacks", f"a refusal that is no line of {LONGEST} characters: {text[:2000]!r}"
    except TimeIsUpError:
        return "hangs", traceback.format_exc()
    except MemoryError:
        return "over_memory", traceback.format_exc()
    except Exception as error:
        kind = "over_memory" if "allocate memory" in str(error) else "tracebacks"
        return kind, traceback.format_exc()
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


def counted(
    cases: range, seed: int, one: Callable[[int, Random], Done], tell: Callable[[int, Done], None] | None = None
) -> dict[str, Any]:
    """Run all cases; return the count of each outcome, and for failed cases their seed, number, changes and message."""
    counts, wrong = Counter[str](), []
    for number in cases:
        found = one(number, Random(f"{seed} {number}"))
        counts[found.kind] += 1
        if found.kind not in ("refused", "accepted"):
            told = {"base": found.of, "done": found.done, "kind": found.kind, "told": found.told}
            wrong.append({"seed": seed, "number": number} | told)
        if tell is not None:
            tell(number, found)
    return {"cases": len(cases), "seed": seed} | {kind: counts[kind] for kind in OUTCOMES} | {"wrong": wrong}


def command(about: str | None, usual: int, campaign: Callable[..., dict[str, Any]]) -> int:
    """Run `campaign(cases, seed, tell)`, print its counts, and write them if asked; return 1 if any case failed, else 0."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=usual)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case by its number")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases = range(asked.cases) if asked.only is None else range(asked.only, asked.only + 1)

    def tell(number: int, found: Done) -> None:
        if asked.only is not None or found.kind not in ("refused", "accepted"):
            print(f"seed {asked.seed} number {number}: {found.kind} after {found.done}\n{found.told}", flush=True)

    found = campaign(cases, asked.seed, tell)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: count for name, count in found.items() if name != "wrong"}))
    return int(bool(found["wrong"]))
