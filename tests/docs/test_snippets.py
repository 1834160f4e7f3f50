"""Python blocks of each document, run one after another, and calls of `compress` that running text quotes."""

import ast
import builtins
import re
from importlib.util import find_spec

import pytest
import torch
import toy_hub
import toy_lm_eval
import yaml
from documented import documents, snippets, text_of
from documented_runs import inside
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.runtime import Artifact, compress

DOCUMENTS = [name for name in documents() if snippets(name, "python")]
ONNX = ("onnx", "onnxruntime")
PACKAGES = {"docs/onnx.md": ONNX, "docs/evaluate.md": ("lm_eval",)}  # packages that are no requirements of the project
GIVEN = ("model", "tokenizer", "artifact", "method")  # names that a text may use without defining them
CALL = re.compile(r"`(compress\((?![^`]*\.\.\.)[^`]*\))`|^    (compress\(.*\))$", re.M)
CALLS = [
    (name, found[1] or found[2])
    for name in documents()
    for found in CALL.finditer(text_of(name))
    if "prefix" not in found[0]
]
HUB = "owner/llama-2-7b-calib"


@pytest.fixture
def given(sandbox):
    """Values of the names in `GIVEN`."""
    model = AutoModelForCausalLM.from_pretrained(sandbox.model)
    values = (model, AutoTokenizer.from_pretrained(sandbox.model), Artifact.load(sandbox.artifact), "kivi")
    return dict(zip(GIVEN, values, strict=True))


@pytest.fixture
def hub(tmp_path, monkeypatch, sandbox):
    """A toy hub with the artifact's repository, which has a tag."""
    hub = toy_hub.used(monkeypatch, tmp_path / "home")
    hub.repos[HUB] = toy_hub.Repo()
    hub.repos[HUB].commit("main", {"calib.safetensors": sandbox.artifact.read_bytes()}, into="v1")
    yield hub
    hub.stop()


def free_names(code):
    """Names that the code reads and never binds, in order."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | {*dir(builtins)}
    bound |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    bound |= {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in ast.walk(ast.parse(code)) if isinstance(node, ast.arg)}
    return [node.id for node in names if node.id not in bound]


def local_tasks(monkeypatch, folder):
    """Replace the lm-eval tasks that the snippet names by toy tasks in this folder."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    toy_lm_eval.save_tasks(folder, cases=2)
    for own, name in ((toy_lm_eval.CHOICE, "arc_easy"), (toy_lm_eval.TEXT, "wikitext")):
        content = yaml.safe_load((folder / f"{own}.yaml").read_text())
        (folder / f"{own}.yaml").write_text(yaml.safe_dump(content | {"task": name}))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    evaluate = lm_eval.simple_evaluate
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **asked: evaluate(**asked, task_manager=manager))


@pytest.mark.full
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_snippets_of_a_document_run(document, sandbox, given, hub, tmp_path, monkeypatch):
    for package in PACKAGES.get(document, ()):
        if find_spec(package) is None:
            pytest.skip(f"{document} needs the package {package}")
    if "lm_eval" in PACKAGES.get(document, ()):
        local_tasks(monkeypatch, tmp_path / "tasks")
    code = "\n".join(block.text for block in snippets(document, "python"))
    with inside(sandbox.folder(document), {}):
        exec(compile(code, document, "exec"), {name: given[name] for name in free_names(code)})


@pytest.mark.parametrize(("document", "call"), CALLS)
def test_a_quoted_call_makes_a_cache(document, call, given):
    if "graphs=True" in call and not torch.cuda.is_available():
        pytest.skip("CUDA graphs need a GPU")
    eval(call, {"compress": compress, **given}).release()


def test_there_are_snippets_and_calls():
    assert {"README.md", "docs/hub.md", "docs/prefix.md", "docs/onnx.md"} <= {*DOCUMENTS} and len(CALLS) >= 5
