"""`lm_eval` as a task of `calib eval`: lm-eval's own figures, what they depend on, what is refused, and a resumed run."""

import json
import random
import sys

import numpy as np
import pytest
import torch
import yaml
from one_line import message
from toy_chat import chat_tokenizer
from toy_evaluation import figures, subject
from toy_language_model import save_toy, toy_model, toy_tokenizer

from calib import cli
from calib.errors import RunError, UsageError
from calib.evaluate.figures import number as worded
from calib.evaluate.tasks import Subject, build_task

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from lm_eval.tasks import TaskManager  # noqa: E402
from toy_lm_eval import ANSWER, CHOICE, TEXT, plain_lm, save_tasks  # noqa: E402

from calib.evaluate.lm_eval.compressed_lm import CompressedLM  # noqa: E402
from calib.evaluate.lm_eval.replay import Replay  # noqa: E402
from calib.evaluate.lm_eval.rows import Scored  # noqa: E402

NAMES = [CHOICE, ANSWER, TEXT]
KIVI = {"bits": 2, "group": 8, "residual": 8}


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tasks(tmp_path_factory.mktemp("tasks") / "own"))


def columns(model, folder, names=NAMES, limit=None, seed=7, **options):
    task = build_task("lm_eval", {"names": names, "include_path": folder, "chunk": 32, **options})
    return task.columns(subject(model, limit=limit, seed=seed))


def plain_results(lm, folder, **options):
    """lm-eval's own results of the three tasks."""
    manager = TaskManager(include_path=folder, include_defaults=False)
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 7)
    options = {"bootstrap_iters": 1000, "log_samples": False, **seeds, **options}
    return lm_eval.simple_evaluate(model=lm, tasks=NAMES, task_manager=manager, **options)["results"]


def same(made, results):
    """Whether a column's figures are lm-eval's."""
    spelled = {key.replace("acc", "accuracy").removesuffix(",none"): value for key, value in results.items()}
    wanted = {name: value for name, value in spelled.items() if name in made}
    return len(wanted) > 0 and made == {
        **made,
        **{name: pytest.approx(value, rel=1e-5) for name, value in wanted.items()},
    }


@pytest.mark.full
def test_the_figures_are_lm_evals(model, folder, monkeypatch):
    """With the full cache against lm-eval's own model, with 2 bits against lm-eval on CompressedLM; prompts have examples."""
    for what in ("add_env_info", "get_git_commit_hash"):  # they take seconds to describe the machine
        monkeypatch.setattr(f"lm_eval.evaluator.{what}", lambda *given: None)
    asked = columns(model, folder, few_shot=2, cases=4)
    plain = plain_results(plain_lm(model, toy_tokenizer()), folder, num_fewshot=2, limit=4)
    lm = CompressedLM(model, toy_tokenizer(), "kivi", batch_size=4, chunk=32, **KIVI)
    low = plain_results(lm, folder, num_fewshot=2, limit=4)
    for name, column in zip(NAMES, asked, strict=True):
        full, two = figures(column, model, "full"), figures(column, model, "kivi", **KIVI)
        assert same(full, plain[name]) and same(two, low[name])
        assert full["cases"] == two["cases"] == 4 and full == figures(column, model, "full")
    assert two["word_perplexity"] != pytest.approx(full["word_perplexity"], rel=1e-3)
    made = figures(asked[0], model, "full")
    error = plain[CHOICE]["acc_stderr,none"]
    assert min(made["accuracy"] + 1.959964 * error, 1) == pytest.approx(made["high"]) and made["requests"] == 12
    assert [column.measure_name for column in asked[::2]] == [
        "accuracy, accuracy norm",
        "word perplexity, bits per byte, byte perplexity",  # in the order of `brief`, whose heading it is
    ]
    assert asked[2].brief(two) == " ".join(
        worded(two[name]) for name in ("word_perplexity", "bits_per_byte", "byte_perplexity")
    )


def test_what_a_column_says_of_itself(model, folder):
    choice, answer, text = columns(model, folder, title="toy")
    assert [column.title for column in (choice, answer, text)] == [f"toy {name}" for name in NAMES]
    assert choice.settings | {"sha256": ""} == {
        "task": "lm_eval",
        "name": CHOICE,
        "lm_eval": lm_eval.__version__,
        "version": "3.0",
        "few_shot": 0,
        "cases": 6,
        "chunk": 32,
        "sha256": "",
    }
    assert answer.settings["max_gen_toks"] == 256 and answer.rows == 6 and choice.rows == 18
    assert text.rows == 9  # the three longest of 90, 180, ... 540 characters are two or three windows each
    prompts = [row.context for row in answer.asked]
    assert answer.prompt == sum(map(len, prompts)) / 6 and answer.length == answer.prompt + 8
    first = sum(32 for row in text.asked if len(row.context) == 1)  # a chunk; windows behind the first have a context
    assert text.prompt == (first + sum(len(row.context) - 1 for row in text.asked)) / 9 and 90 < text.length <= 256
    assert not choice.reads_pages and sum(len(batch.rows) for batch in choice.batches()) == 18
    made = figures(choice, model, "full")
    shown = (
        f"{made['accuracy']:.3f} [{made['low']:.3f}, {made['high']:.3f}], accuracy norm {made['accuracy_norm']:.3f} ["
    )
    assert choice.words(made).startswith(f"accuracy {shown}")
    assert choice.brief(made) == f"{made['accuracy']:.3f} {made['accuracy_norm']:.3f}"


@pytest.mark.full
def test_chat_templates_are_lm_evals(model, folder, monkeypatch):
    for what in ("add_env_info", "get_git_commit_hash"):  # they take seconds to describe the machine
        monkeypatch.setattr(f"lm_eval.evaluator.{what}", lambda *given: None)
    task = build_task("lm_eval", {"names": NAMES[:2], "include_path": folder, "chunk": 32, "chat_template": True})
    asked = task.columns(Subject(model, chat_tokenizer(), 7, 4, None))
    tokenizer = chat_tokenizer()
    prompt = tokenizer.decode(asked[1].asked[0].context)
    assert prompt.startswith("<s><u>") and prompt.endswith("\n<a>") and prompt.count("<s>") == 1
    lm = CompressedLM(model, tokenizer, "kivi", batch_size=4, chunk=32, **KIVI)
    found = plain_results(lm, folder, apply_chat_template=True)
    for name, column in zip(NAMES[:2], asked, strict=True):
        assert same(figures(column, model, "kivi", **KIVI), found[name])
        plain = columns(model, folder, name)[0].settings
        assert column.settings["sha256"] != plain["sha256"] and "chat_template" not in plain
    with pytest.raises(
        UsageError, match=r"tasks\.lm_eval\.chat_template is true and this model's tokenizer has no chat"
    ):
        columns(model, folder, chat_template=True)


def test_equal_settings_are_equal_data(model, folder, tmp_path):
    (first,), (again,) = columns(model, folder, CHOICE, few_shot=1), columns(model, folder, [CHOICE], few_shot=1)
    assert first.settings == again.settings and first.asked == again.asked
    (moved,) = columns(model, str(save_tasks(tmp_path / "moved")), CHOICE, few_shot=1)
    assert moved.settings == first.settings
    others = [columns(model, folder, CHOICE, few_shot=1, seed=8)[0], columns(model, folder, CHOICE, few_shot=2)[0]]
    others += [columns(model, folder, CHOICE, few_shot=1, limit=5)[0]]
    changes = [{"doc_to_target": "{{1}}"}, {"metric_list": [{"metric": "acc"}]}, {"doc_to_text": "{{text}}"}]
    others += columns(model, folder, CHOICE, few_shot=0)
    for number, change in enumerate(changes):
        others += columns(model, str(save_tasks(tmp_path / str(number), **change)), CHOICE, few_shot=1)
    labels = save_tasks(tmp_path / "labels") / "docs.json"  # the same questions
    labels.write_text(labels.read_text().replace('"gold": 0', '"gold": 2'))
    others += columns(model, str(labels.parent), CHOICE, few_shot=0)
    hashes = [column.settings["sha256"] for column in (first, *others)]
    assert len(set(hashes)) == len(hashes)
    assert others[2].rows == 15 and others[2].settings["cases"] == 5
    (all_of_them,) = columns(model, folder, CHOICE, cases=None)
    assert all_of_them.settings["cases"] == 6


def test_a_tasks_own_examples_hold_where_none_are_asked_for(model, tmp_path):
    three = str(save_tasks(tmp_path / "three", num_fewshot=3))
    zero = str(save_tasks(tmp_path / "zero", num_fewshot=0))
    assert [columns(model, three, CHOICE, few_shot=n)[0].settings["few_shot"] for n in (None, 1)] == [3, 1]
    assert [columns(model, zero, CHOICE, few_shot=n)[0].settings["few_shot"] for n in (None, 1)] == [0, 0]


@pytest.mark.full
def test_nothing_is_drawn_from_the_processs_generators(model, folder):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    made = [figures(column, model, "full") for column in columns(model, folder, few_shot=1)]
    assert states() == before and len(made) == 3


def test_samples_are_the_seeds(model, tmp_path):
    drawing = {"generation_kwargs": {"do_sample": True, "temperature": 1.5, "max_gen_toks": 9}}
    folder = str(save_tasks(tmp_path / "drawing", **drawing))

    def texts(seed):
        (column,) = columns(model, folder, ANSWER, seed=seed)
        from calib.runtime import compress

        with compress(model, "full") as cache:
            return column.measure(cache, column.batches()[0]).answers

    before = torch.get_rng_state()
    assert texts(1) == texts(1) != texts(2) and torch.equal(before, torch.get_rng_state())


def test_a_group_has_its_own_figure(model, folder, tmp_path):
    save_tasks(tmp_path / "two", tag="toy_tag")
    for name, metrics in (("toy_group", [{"metric": "acc", "weight_by_size": True}]), ("toy_heap", None)):
        content = {
            "group": name,
            "task": [CHOICE, TEXT] if metrics is None else [CHOICE, ANSWER],
            "metadata": {"version": 2},
        }
        content |= {"aggregate_metric_list": metrics} if metrics else {}
        (tmp_path / "two" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    from calib.evaluate.lm_eval.named_task import NamedTask

    manager = TaskManager(include_path=str(tmp_path / "two"), include_defaults=False)
    for name in ("toy_heap", "toy_tag"):
        with pytest.raises(
            UsageError, match=f"'{name}' is a group of . tasks without a common metric; give its tasks: .*{CHOICE}.*"
        ) as error:
            NamedTask(manager, name, None, 3, 7)
        assert message(error)
    group, alone = (NamedTask(manager, name, None, 3, 7) for name in ("toy_group", CHOICE))
    assert group.settings["cases"] == 6 and group.settings["version"] == "2"
    lm = CompressedLM(model, toy_tokenizer(), "full", chunk=64)
    assert group.results(lm)["acc,none"] == alone.results(lm)["acc,none"]


def test_answers_to_other_requests_are_not_taken():
    rows = [Scored([1], [2]), Scored([1], [3])]
    replay = Replay(toy_tokenizer(), 256, 8, [(rows[0], (-1.0, True)), (rows[1], (-2.0, False))])
    assert replay.answers(rows[:1], True) == [(-1.0, True)] and replay.left == 1
    with pytest.raises(RunError, match="made other requests when it was run a second time"):
        replay.answers(rows[:1], True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "invalid value () for 'tasks.lm_eval.names' (a name, or a list of names)"),
        ({"names": []}, "invalid value [] for 'tasks.lm_eval.names'"),
        ({"names": ["a", 3]}, "invalid value ['a', 3] for 'tasks.lm_eval.names'"),
        ({"names": "a", "few_shot": -1}, "invalid value -1 for 'tasks.lm_eval.few_shot' (a whole number, at least 0)"),
        ({"names": "a", "cases": 0}, "invalid value 0 for 'tasks.lm_eval.cases'"),
        ({"names": "a", "chunk": None}, "invalid value None for 'tasks.lm_eval.chunk' (a whole number, at least 1)"),
        ({"names": "a", "max_gen_toks": 0}, "invalid value 0 for 'tasks.lm_eval.max_gen_toks'"),
        ({"names": "a", "include_path": 3}, "'tasks.lm_eval.include_path' must be a folder, a list or null, got 3"),
        ({"names": "a", "title": "a|b"}, "invalid value 'a|b' for 'tasks.lm_eval.title'"),
        ({"name": "a"}, "did you mean 'tasks.lm_eval.names'?"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError) as error:
        build_task("lm_eval", options)
    assert text in message(error)


def test_without_lm_eval_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError) as error:
        build_task("lm_eval", {"names": "arc_easy"})
    assert message(error) == "tasks.lm_eval needs the package lm-eval: pip install 'calib-kv[lm-eval]'"


def test_tasks_that_cannot_be_had(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.capture.language_model.hub_answers", lambda: False)
    far = str(save_tasks(tmp_path / "far", dataset_path="nobody/nothing", dataset_kwargs=None))
    broken = str(save_tasks(tmp_path / "broken", output_type="multiple"))
    no_data = str(save_tasks(tmp_path / "gone", dataset_kwargs={"data_files": {"test": str(tmp_path / "none.json")}}))
    unsafe = str(save_tasks(tmp_path / "unsafe", unsafe_code=True))
    long = str(save_tasks(tmp_path / "long", generation_kwargs={"max_gen_toks": 300}))
    for name, where, text in (
        (TEXT, far, f"'{TEXT}' needs the data set 'nobody/nothing' that cannot be had"),
        (CHOICE, no_data, f"'{CHOICE}' needs the data set 'json' that cannot be had (FileNotFoundError"),
        (CHOICE, broken, f"lm-eval cannot load '{CHOICE}' (ValueError"),
        (CHOICE, str(tmp_path / "nowhere"), "tasks.lm_eval.include_path: no folder '"),
        (ANSWER, long, "max_gen_toks=300 leaves no room for a prompt in the 256 tokens"),
        (ANSWER, unsafe, f"'{ANSWER}' runs what the model wrote, which is not done here; leave it out"),
    ):
        with pytest.raises(UsageError) as error:
            columns(model, where, name)
        assert text in message(error)
    with pytest.raises(UsageError) as error:
        columns(model, far, TEXT)
    assert message(error).endswith("without network give HF_HOME with a copy, or local tasks (include_path)")


def test_an_unknown_name_is_told_the_nearest(model, folder, monkeypatch):
    from calib.evaluate.lm_eval import named_task

    real = named_task.TaskManager  # without lm-eval's thousands of own files
    monkeypatch.setattr(named_task, "TaskManager", lambda **options: real(**{**options, "include_defaults": False}))
    for name, text in (
        ("toy_choise", "has no task 'toy_choise' (did you mean 'toy_choice' or "),
        ("?", "`lm-eval ls tasks` lists"),
    ):
        with pytest.raises(UsageError) as error:
            columns(model, folder, name)
        assert text in message(error)


@pytest.mark.full
def test_a_run_with_lm_eval_tasks_goes_on_where_it_was(folder, tmp_path, capsys):
    model = str(save_toy(tmp_path / "model"))
    methods = [{"name": "full", "method": "full"}, {"name": "kivi-2", "method": "kivi", **KIVI}]
    task = {"task": "lm_eval", "names": [CHOICE, TEXT], "include_path": folder, "cases": 3, "chunk": 32}
    config = tmp_path / "toy.yaml"
    config.write_text(yaml.safe_dump({"model": model, "seed": 3, "methods": methods, "tasks": [task]}))
    documents = []
    for words in ((), (), ("--limit", "2")):
        assert cli.main(["eval", "--config", str(config), "--output", str(tmp_path / "out"), *words]) == 0
        documents.append(json.loads((tmp_path / "out" / "results.json").read_text()))
    first, again, limited = documents
    assert again == first and "4 cells, 4 of them finished before" in capsys.readouterr().out
    assert (
        [cell["figures"]["cases"] for cell in limited["cells"]]
        == [2] * 4
        != [c["figures"]["cases"] for c in first["cells"]]
    )
    full, two = first["cells"][:2], first["cells"][2:]
    assert full[1]["figures"]["word_perplexity"] != two[1]["figures"]["word_perplexity"]
    assert all(cell["sizes"]["bits_per_value"] > 0 for cell in first["cells"])
    page = (tmp_path / "out" / "report.md").read_text()
    assert f"## {CHOICE}" in page and "accuracy 0." in page
