"""What `calib tune` does: load the model, measure every candidate, choose for each budget, write and print the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.artifact_name import load_artifact
from calib.artifact_view.terminal import show
from calib.capture.corpus import text_sequences, token_hash
from calib.capture.generated import generated_sequences
from calib.capture.language_model import load
from calib.documents.corpus import TextSource, text_hash
from calib.errors import RunError, UsageError
from calib.evaluate.loaded import usable_device
from calib.method_options import as_usage
from calib.runtime.completed import completed
from calib.runtime.files.atomic_file import write_atomically
from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.methods import check_rope, method_class
from calib.runtime.methods.tuned import with_choices
from calib.tune.candidates import candidates, grid_of
from calib.tune.fetched import FetchedPairs, Link, check_link, fetched_within
from calib.tune.loss import check_sensitivities
from calib.tune.measure import Subject, measure
from calib.tune.page import page
from calib.tune.result import Search
from calib.tune.tables import budget_table, layer_table
from calib.tune.tracking import track


@dataclass(frozen=True)
class Request:
    """The options of the command line, checked as far as possible without the model."""

    method: str
    options: Mapping[str, Any]
    budgets: Sequence[float]
    model: str
    dtype: str
    device: str
    artifact: Path
    output: Path
    html: Path | None
    text: Path | None
    natural_spacing: bool
    length: int
    sequences: int
    batch_size: int
    seed: int
    link: Link
    logs: Path
    command: str


def tune(request: Request) -> int:
    """Runs the request and writes the artifact with its choices; returns 0.

    Raises:
        UsageError: if the method has no options to choose, a budget is too small, the artifact has no sensitivities or is for
            another model, or the text does not fill a sequence.
        RunError: if a file cannot be written.
    """
    with as_usage():
        grid_of(request.method, request.options)
        check_link(request.method, request.options, request.link)
    device = usable_device(request.device)
    artifact = load_artifact(request.artifact)
    check_sensitivities(artifact, request.artifact.name)
    model, tokenizer = load(request.model, request.dtype)
    model.to(device)
    subject = Subject.of(model, artifact, request.seed)
    with as_usage():
        check_rope(request.method, model)
        shape = subject.layers, subject.geometry, artifact, model.dtype
        found = candidates(request.method, request.options, *shape, lambda plans: completed(plans, model, tokenizer))
    tokens, origin = sequences(request, model, tokenizer)
    print(
        f"{len(found)} candidates in {len(subject.layers)} layers, {len(tokens)} sequences of {tokens.shape[1]} tokens"
    )
    batches = tokens.to(device).split(request.batch_size)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("storing every candidate in every layer", total=len(batches) * len(subject.layers))
        measured = measure(subject, batches, [one.plans for one in found], lambda: bar.advance(task))
    search = Search(request.method, found, measured)
    cheapest = search.reach()[0]
    pairs = {budget: fetched_pairs(request, subject, budget - cheapest) for budget in request.budgets}
    settings = {budget: search.at(budget, 0.0 if own is None else own.bits) for budget, own in pairs.items()}
    measured_on = origin | {
        "tokens_sha256": token_hash(tokens),
        "sequences": len(tokens),
        "length": tokens.shape[1],
        "seed": request.seed,
        "dtype": dtype_name(model.dtype),
    }
    layers = artifact.fingerprint["layers"]
    chosen = [
        search.choice(budget, setting, layers, measured_on, pairs[budget]) for budget, setting in settings.items()
    ]
    front = search.front()
    tables = [budget_table(chosen), *(layer_table(choice) for choice in chosen)]
    with_choices(artifact, chosen).save(request.output)
    written = {"calibration": request.output}
    if request.html is not None:
        text = page(search, settings, front, tables, request.command)
        try:
            write_atomically(request.html, text.encode())
        except OSError as error:
            raise RunError(f"{request.html}: cannot be written ({error.strerror}); choose another folder") from error
        written["report"] = request.html
    track(search, settings, front, tables, {**measured_on, "method": request.method}, request.logs, written)
    show(tables)
    print(f"wrote {' and '.join(str(path) for path in written.values())}")
    return 0


def fetched_pairs(request: Request, subject: Subject, left: float) -> FetchedPairs | None:
    """Returns how many pairs this method fetches for a decode step, for at most `left` bits per value; None if it fetches none."""
    option = method_class(request.method).grid.fetched
    if option is None:
        return None
    geometry, context = subject.geometry, request.link.context or longest(subject.model)
    if context is None:
        raise UsageError("this model does not say how many tokens it was made for: give --context")
    itemsize = subject.model.dtype.itemsize
    return fetched_within(
        option, request.options.get(option), request.link, context, len(subject.layers), geometry, itemsize, left
    )


def longest(model: PreTrainedModel) -> int | None:
    """Returns the model's `max_position_embeddings`, or None if its configuration has none."""
    found: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found


def sequences(
    request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, dict[str, Any]]:
    """Returns token ids `[sequences, length]` and their origin: from the text, or generated as by `calib fit`."""
    most = longest(model)
    if most is not None and request.length > most:
        raise UsageError(f"--length {request.length}: this model was made for {most} tokens; give at most that")
    if request.text is None:
        found = generated_sequences(model, tokenizer, request.length, request.sequences, request.seed)
        return found, {"text": "generated"}
    source = TextSource([request.text], natural_spacing=request.natural_spacing)
    text = source.read()
    found = text_sequences(text, tokenizer, request.length, request.sequences, request.seed, source.label)
    return found, {"text": source.label, "sha256": text_hash(text)}
