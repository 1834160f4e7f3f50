"""Takes over cells of an earlier run, from its `results.json`, that would give the same figures and need not be measured again.

From the file, the key of every cell is computed as by `Cell.key(Evaluation.base)`: model, dtype, device, seed, batch size,
versions; method, options, settings of the column, artifact. A cell of this run that has one of these keys is taken over, and its
result records where it was measured. Two more things that figures depend on are compared separately, since not every file records
them: the tokenizer with its special tokens, and the packages that give answers (`Entry.packages`). A package without a recorded
version counts as different. Runs of earlier releases do not record the tokenizer, or not its special tokens; for them the same
weights and configuration suffice, and a note says so.

The code itself is not in the file and is not compared; only calib's version is.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calib.errors import UsageError
from calib.evaluate.cell import Cell, Result, cell_key
from calib.evaluate.compare import TOLD, differing
from calib.evaluate.evaluation import VERSIONS, Evaluation
from calib.evaluate.figures import spoken
from calib.evaluate.result_check import PARTS, incomplete
from calib.evaluate.run_file import Run, read_run
from calib.runtime.files.canonical_json import plain

SHOWN = 3  # cells that a note names, of those that differ in the same way
OF_MODEL = ("config_hash", "weights")  # hashes, whose values are not shown


@dataclass(frozen=True)
class EarlierRun:
    """A checked `results.json`.

    Attributes:
        name: name of the file.
        content: content of the file.
        digest: SHA-256 of the file.
    """

    name: str
    content: Run
    digest: str

    @staticmethod
    def read(name: str) -> "EarlierRun":
        """Reads the file `name`; raises UsageError if it is missing or not a run of `calib eval`."""
        content = read_run(name)
        return EarlierRun(name, content, hashlib.sha256(Path(name).read_bytes()).hexdigest())

    def base(self) -> dict[str, Any]:
        """What all its cells depend on, in the form of `Evaluation.base`; None for entries that the file does not have."""
        config, model, versions = (self.content[part] for part in ("config", "model", "versions"))
        products = config.get("products", "model")  # earlier releases had no other
        return {
            **{key: model.get(key) for key in OF_MODEL},
            **{key: config.get(key) for key in ("dtype", "device", "seed", "batch_size")},
            **({} if products == "model" else {"products": products}),
            "versions": {name: versions.get(name) for name in ("calib", *VERSIONS)},
        }

    def artifact(self, cell: Mapping[str, Any]) -> str | None:
        """SHA-256 of the artifact that a cell of the file used; None if it used none."""
        return self.content["config"].get("artifact") if cell.get("artifact") else None

    def settings(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the column of a cell of the file."""
        column = next(column for column in self.content["columns"] if column["title"] == cell["column"])
        return {key: value for key, value in column.items() if key not in TOLD}

    def key(self, cell: Mapping[str, Any]) -> str:
        """The key of a cell of the file."""
        return cell_key(self.base(), cell["method"], cell["options"], self.settings(cell), self.artifact(cell))


@dataclass
class TakenOver:
    """Results that a run takes over and need not measure.

    Attributes:
        results: the results by key.
        notes: a line for each reason for which cells with the same name and column are not taken over.
    """

    results: dict[str, Result] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def taken_over(evaluation: Evaluation, earlier: EarlierRun, finished: Collection[str]) -> TakenOver:
    """Returns the results of `earlier` for cells of `evaluation`; cells with a key in `finished` get no note if they differ.

    Raises UsageError that names the difference if no cell can be taken over: another model, dtype, device, seed, batch size,
    products, versions or tokenizer, or no cell of `evaluation` with the same key in the file.
    """
    if other := "; ".join(differences(evaluation, earlier)):
        raise UsageError(f"--reuse {earlier.name} differs from this run: {other}; run without --reuse")
    known = {earlier.key(cell): cell for cell in earlier.content["cells"] if "figures" in cell}
    named = {(cell["name"], cell["column"]): cell for cell in earlier.content["cells"]}
    found, reasons = TakenOver(), dict[str, list[str]]()
    for cell in evaluation.cells:
        key, told = evaluation.key(cell), cell.key(evaluation.base)
        theirs = known.get(told) or named.get((cell.entry.label, cell.column.title))
        if theirs is None:
            continue
        reason = why_not(cell, theirs, earlier) or (None if told in known else "its key differs, for an unknown reason")
        if reason is None:
            found.results[key] = result_of(theirs, earlier)
        elif key not in finished:
            reasons.setdefault(reason, []).append(f"{cell.entry.label} ({cell.column.title})")
    if "tokenizer" not in earlier.content["model"]:
        found.notes = [
            f"{earlier.name} does not record its tokenizer; only the model's weights and configuration are known to be equal"
        ]
    elif "special_tokens" not in earlier.content["model"]:
        found.notes = [
            f"{earlier.name} does not record its special tokens; only the tokenizer's words and how it splits are known to be equal"
        ]
    found.notes += [f"not taken over from {earlier.name}: {shortened(who)}: {why}" for why, who in reasons.items()]
    if not found.results:
        why = (
            "; ".join(found.notes[-len(reasons) :] if reasons else ()) or f"{earlier.name} has none of this run's cells"
        )
        raise UsageError(f"--reuse: no cell can be taken over: {why}; run without --reuse")
    return found


def differences(evaluation: Evaluation, earlier: EarlierRun) -> list[str]:
    """Returns the differences in what all cells depend on, such as "seed 21 (now 20)"."""
    mine, theirs = ({**base, **base["versions"], "versions": None} for base in (evaluation.base, earlier.base()))
    model = [spoken(key) for key in OF_MODEL if mine[key] != theirs[key]]
    found = [f"another model ({', '.join(model)})"] * bool(model)
    found += differing({"products": "model", **mine}, {"products": "model", **theirs}, *OF_MODEL)
    tokenizer = earlier.content["model"].get("tokenizer")
    if tokenizer is not None and tokenizer != evaluation.tokenizer:
        found.append("another tokenizer")
    special = earlier.content["model"].get("special_tokens")
    if isinstance(special, Mapping):
        found += [f"special tokens: {one}" for one in differing(evaluation.special_tokens, special)]
    return found


def why_not(cell: Cell, theirs: Mapping[str, Any], earlier: EarlierRun) -> str | None:
    """Returns why a cell of the file cannot be taken over as `cell`; None if nothing is known, apart from `differences`."""
    if "error" in theirs:
        return f"it failed ({theirs['error']})"
    mine = plain({"method": cell.entry.method, **cell.options()}, cell.entry.label)
    if asked := "; ".join(differing(mine, {"method": theirs["method"], **theirs["options"]})):
        return f"other options: {asked}"
    if data := "; ".join(differing(plain(cell.column.settings, cell.column.title), earlier.settings(theirs))):
        return f"other data: {data}"
    if cell.artifact_hash != earlier.artifact(theirs):
        return "another artifact"
    packages, said = cell.entry.packages, theirs.get("packages", {})
    if packages != said:
        missing = [name for name in packages if name not in said]
        told = (
            f"the version of {', '.join(missing)} is not recorded" if missing else "; ".join(differing(packages, said))
        )
        return told
    return incomplete(cell.column, theirs)


def result_of(theirs: Mapping[str, Any], earlier: EarlierRun) -> Result:
    """Returns the result of a cell of the file, with a record (`reused`) of the run that measured it first."""
    source = {"results_sha256": earlier.digest, "machine": earlier.content.get("machine", {})}
    return {**{part: theirs[part] for part in PARTS}, "reused": theirs.get("reused", source)}


def shortened(names: Sequence[str]) -> str:
    """Joins the first `SHOWN` names, and says how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
