"""YAML blocks of the documents are valid requests of `calib eval` or `calib bench`, and each of their methods can be planned."""

import json
from importlib.util import find_spec

import pytest
import yaml
from documented import documents, snippets

from calib.bench.request import BenchRequest
from calib.evaluate.entries import MethodEntry
from calib.evaluate.request import Request
from calib.runtime import Artifact
from calib.runtime.methods import Geometry

BLOCKS = [(name, block) for name in documents() for block in snippets(name, "yaml")]
LLAMA = Geometry(layers=2, kv_heads=2, head_dim=128)
ANSWERS = {"format": 1, "name": "another", "options": {}, "versions": {}, "weights": {}, "dtype": "", "columns": []}


@pytest.fixture(scope="module")
def fitted(sandbox):
    return Artifact.load(sandbox.artifact)


def test_there_are_configurations():
    assert len(BLOCKS) >= 25 and {"docs/evaluate.md", "docs/bench.md"} <= {name for name, _ in BLOCKS}


@pytest.mark.parametrize(("document", "block"), BLOCKS, ids=lambda part: getattr(part, "line", part))
def test_every_method_of_a_configuration_is_planned(document, block, fitted, tmp_path, monkeypatch):
    """The request's columns are built, too; those of lm-eval only if it is installed."""
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(block.text)
    for path in (row["results"] for row in content["methods"] if "results" in row):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(ANSWERS))
    if "contexts" in content:
        request: BenchRequest | Request = BenchRequest.of(content, "bench")
        titles = [f"{context} tokens" for context in request.contexts]
    else:
        asked = [task for task in content.get("tasks", []) if task["task"] != "lm_eval" or find_spec("lm_eval")]
        request = Request.of({**content, "tasks": asked or [{"task": "retrieval"}]}, "eval")
        titles = request.titles()
    if "papers" in document:  # the papers' figures are of other models than the default
        assert request.model != "artifacts/tiny-llama"
    own = Geometry(**{name: fitted.fingerprint[name] for name in ("layers", "kv_heads", "head_dim")})
    for entry in request.methods:
        for title in titles if isinstance(entry, MethodEntry) else ():
            artifact, shape = (fitted, own) if entry.uses_artifact else (None, LLAMA)
            entry.build(title).plan(0, shape, artifact)
