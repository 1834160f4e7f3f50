"""The model card (README.md) of an artifact on the hub: front matter, how to load it, what was measured."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from calib.runtime.messages.artifact_error import ArtifactError

if TYPE_CHECKING:
    from calib.runtime.artifact.artifact import Artifact

CARD = "README.md"
LIBRARY = "calib"
TAGS = ["kv-cache", "kv-cache-compression", "calibration", "safetensors"]
OURS = re.compile(rf"\A---\n(?:(?!---\n).*\n)*?library_name: {LIBRARY}\n")  # front matter that names our library
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LEADING = ("group", "layer", "layers", "stream")  # columns that identify a row, which come first
HEAD = """# KV-cache calibration of {model}

What `calib fit` measured about the keys and values of {model}, in one safetensors file: {count} tensors that calib's
methods compress its KV cache with. It holds none of the model's weights.

```python
from transformers import AutoModelForCausalLM

from calib.runtime import Artifact, compress

model = AutoModelForCausalLM.from_pretrained("{model}")
artifact = Artifact.from_pretrained("{where}")
with compress(model, method="kivi", artifact=artifact, bits=2) as cache:
    model.generate(..., past_key_values=cache)
```

`calib inspect` shows everything the file holds. A model with another configuration or other weights is refused
(`allow_finetuned=True` takes a relative with the same configuration).
"""


def card(
    artifact: "Artifact",
    existing: str | None,
    where: str,
    license: str | None = None,
    base_model: str | None = None,
) -> str | None:
    """Returns the text of the README.md to write; None if `existing` is not calib's (a model's own card) and stays.

    where: the name for `Artifact.from_pretrained`. license, base_model: for the front matter; without base_model the name by
    which the model was loaded in the fit, if that was a hub name. Raises `ArtifactError` if they are given and `existing` stays.
    """
    if existing is not None and not OURS.match(existing.replace("\r\n", "\n")):
        if license is not None or base_model is not None:
            raise ArtifactError(
                "README.md there is not calib's and stays as it is, got license= or base_model= for it; "
                "leave them out, or put the artifact into a folder or repository of its own"
            )
        return None
    fitted_on = text_of(artifact.provenance.get("config"), "model")
    corpus = text_of(artifact.provenance.get("data"), "name").split(" ")[0]  # name, configuration and split
    front = ModelCardData(
        base_model=base_model or (fitted_on if HUB_NAME.fullmatch(fitted_on) else None),
        datasets=[corpus] if HUB_NAME.fullmatch(corpus) else None,
        library_name=LIBRARY,
        license=license,
        tags=TAGS,
    )
    model = base_model or fitted_on or str(artifact.fingerprint["architecture"])
    model, where = (re.sub(r"[^\w./-]", "", word) for word in (model, where))  # they stand in code
    head = HEAD.format(model=model, where=where, count=len(artifact.tensors))
    return f"---\n{front.to_yaml()}\n---\n{head}{''.join(sections(artifact))}"


def text_of(value: Any, key: str) -> str:
    """Returns `value[key]` if that is a text, else ""."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else ""


def sections(artifact: "Artifact") -> Iterator[str]:
    """Yields the sections on fingerprint, corpus, versions and metrics, each empty if the artifact has nothing for it."""
    provenance = dict(artifact.provenance)
    yield section("The model's fingerprint", artifact.fingerprint, leave_out=("config",))
    yield section("The corpus", provenance.get("data"))
    yield section("How it was fitted", {key: provenance[key] for key in ("seed", "versions") if key in provenance})
    metrics = provenance.get("metrics")
    if isinstance(metrics, Mapping):
        single = {key: value for key, value in metrics.items() if not isinstance(value, Mapping | list)}
        yield section("Fit metrics", single)
        for key, value in sorted(metrics.items()):
            if key not in single:
                yield section(f"Fit metrics: {key}", value)


def section(title: str, value: Any, leave_out: Sequence[str] = ()) -> str:
    """A heading and a table of a mapping's entries, or of a list's mappings; "" if `value` is neither or empty."""
    if isinstance(value, Mapping) and value:
        header, rows = ["", ""], [[key, cell(value[key])] for key in sorted(value) if key not in leave_out]
    elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        names = sorted({name for entry in value for name in entry}, key=lambda name: (name not in LEADING, name))
        header, rows = names, [[cell(entry.get(name)) for name in names] for entry in value]
    else:
        return ""
    lines = [line(header), "|" + "---|" * len(header), *map(line, rows)]
    return f"\n## {plain_text(title)}\n\n" + "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(entry)}" for key, entry in sorted(value.items()))
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:.4g}" if value % 1 else f"{value:.0f}"
    return "" if value is None else str(value)


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(map(plain_text, cells)) + " |"


def plain_text(text: str) -> str:
    """`text` with the characters of Markdown and HTML escaped, and others that are not printable replaced by spaces."""
    visible = "".join(letter if letter.isprintable() else " " for letter in text)
    return re.sub(r"[\\|`*\[\]<>&#]", lambda found: f"&#{ord(found[0])};", visible)
