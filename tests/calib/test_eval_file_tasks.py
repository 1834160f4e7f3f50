"""`calib eval` with the tasks that generate: whole runs, a template that makes other cells, one line for wrong data."""

import json

import pytest
import yaml
from toy_chat import chat_tokenizer
from toy_language_model import letters_alone, save_toy, toy_model

from calib import cli

METHODS = [{"name": "full", "method": "full"}, {"name": "kivi-2", "method": "kivi", "bits": 2, "residual": 32}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_toy(tmp_path_factory.mktemp("model"))
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A toy model for 512 tokens instead of 256, which the prompt of a pass key alone exceeds; it generates letters only."""
    made = letters_alone(toy_model())
    made.config.max_position_embeddings = 512
    return str(save_toy(tmp_path_factory.mktemp("larger"), model=made))


@pytest.fixture
def evaluate(model, tmp_path, capsys):
    """A function that runs tasks; returns the exit status, the output, and results.json, or after a failure whether it exists."""

    def run(*tasks, model=model):
        config, output = tmp_path / "files.yaml", tmp_path / "out"
        config.write_text(yaml.safe_dump({"model": model, "methods": METHODS, "tasks": list(tasks)}))
        status = cli.main(["eval", "--config", str(config), "--output", str(output)])
        results = output / "results.json"
        return status, capsys.readouterr(), json.loads(results.read_text()) if status == 0 else results.exists()

    return run


def written(path, *records):
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(path)


def test_a_run_and_what_its_report_says(evaluate, tmp_path):
    lines = written(
        tmp_path / "lines.jsonl",
        *({"prompt": "line: <7>. " * (1 + 12 * case) + "Which?", "expected_number": 7} for case in range(3)),
    )
    question = written(tmp_path / "test.jsonl", {"question": "One more?", "answer": "#### 2"})
    tasks = [
        {"task": "longeval", "file": lines, "new_tokens": 6, "chat_template": True},
        {"task": "gsm8k", "file": question, "new_tokens": 6, "title": "sums"},
    ]
    status, shown, results = evaluate(*tasks)
    assert status == 0 and "4 cells, 0 of them finished before" in shown.out
    assert [cell["column"] for cell in results["cells"]] == ["lines", "sums"] * 2
    for cell in results["cells"]:
        assert cell["figures"]["cases"] == (3 if cell["column"] == "lines" else 1)
        assert cell["sizes"]["measured_bytes"] > 0 and cell["sizes"]["dynamic_bytes"] > 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert "cut\\_prompts 1" in page or "cut_prompts 1" in page
    assert "† sums does not distinguish the methods: full has 0.000" in page
    status, shown, _ = evaluate(*tasks)
    assert status == 0 and "4 cells, 4 of them finished before" in shown.out
    tasks[0]["chat_template"] = False
    assert "4 cells, 2 of them finished before" in evaluate(*tasks)[1].out


def test_a_template_makes_other_cells(evaluate):
    task = {"task": "retrieval", "lines": [2], "cases": 2}
    assert "2 cells, 0 of them finished before" in evaluate(task)[1].out
    status, shown, results = evaluate({**task, "chat_template": True})
    assert status == 0 and "2 cells, 0 of them finished before" in shown.out
    assert results["columns"][0]["chance"] == 0.5 and len(results["columns"][0]["chat_template"]) == 16
    assert "2 cells, 2 of them finished before" in evaluate(task)[1].out


@pytest.mark.full
def test_pass_keys_sentences_and_functions(evaluate, larger, tmp_path):
    one = {"prompt": 'def one():\n    return 1\n\n\nSAID = """', "entry_point": "one"}
    tests = [{**one, "test": f'"""\n\n\ndef check(one):\n    assert one() == {number}'} for number in (1, 2)]
    sentence = {"sentence": "It is blue.", "question": "What is it?", "expected": ["blue"]}
    short = {"depths": [0, 1], "cases": 1, "new_tokens": 6}
    tasks = [
        {"task": "passkey", "lengths": [400], **short},
        {"task": "needle", "lengths": [200], "needle": sentence, **short},
        {"task": "humaneval", "file": written(tmp_path / "toy.jsonl", *tests), "new_tokens": 6},
    ]
    status, shown, ran = evaluate(*tasks, model=larger)
    assert status == 2 and ran is False
    assert shown.err.startswith("calib: error: tasks.humaneval runs the code that the model writes")
    tasks[2]["run_code"] = True
    status, shown, results = evaluate(*tasks, model=larger)
    assert status == 0 and "6 cells, 0 of them finished before" in shown.out
    for cell, title in zip(results["cells"], ["passkey 400", "needle 200", "humaneval"] * 2, strict=True):
        figures = cell["figures"]
        assert (cell["column"], figures["cases"]) == (title, 2) and cell["sizes"]["measured_bytes"] > 0
        assert figures["exact"] == (0.5 if title == "humaneval" else 0.0)
        assert ("exact at depth 1" in figures) is (title != "humaneval")
    assert "humaneval: pass@1" in (tmp_path / "out" / "report.md").read_text()
    status, shown, _ = evaluate({**tasks[0], "chat_template": True}, model=larger)
    assert status == 2 and "tasks.passkey.chat_template is true" in shown.err
    status, shown, _ = evaluate(tasks[0])
    assert status == 2 and "passkey takes 400 tokens and this model was made for 256; give" in shown.err


@pytest.mark.parametrize("task", ["longeval", "gsm8k", "humaneval"])
def test_wrong_data_are_one_line_before_anything_runs(evaluate, tmp_path, task):
    allowed = {"run_code": True} if task == "humaneval" else {}
    status, shown, ran = evaluate({"task": task, "file": written(tmp_path / "wrong.jsonl", [1]), **allowed})
    assert status == 2 and ran is False and shown.err.count("\n") == 1
    assert shown.err.startswith(f"calib: error: tasks.{task}: line 1 of ") and "is [1] and no object" in shown.err
