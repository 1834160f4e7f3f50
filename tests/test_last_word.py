"""The task of benchmarks/last_word.py: what its passages hold, and that lm-eval reads what it writes."""

import json
import random
import subprocess
import sys

import pytest

from benchmarks.last_word import DISTANCE, WORDS, last_words, paragraphs

NAMES = ("harbour", "lantern", "Bridges", "meadow", "sparrow")


def text(seed: int = 0) -> str:
    """Forty paragraphs of four sentences under headings; names come again and again."""
    draw = random.Random(seed)
    filler = [f"{chr(97 + number)}x" for number in range(20)]  # too short to be asked about
    lines = []
    for number in range(40):
        middle, last = draw.choices(NAMES, k=4), draw.choices(NAMES, k=4)
        sentences = [
            " ".join(["The", *draw.choices(filler, k=9), one, *draw.choices(filler, k=9), other]) + "."
            for one, other in zip(middle, last, strict=True)
        ]
        lines += [f" = Heading {number} = ", " ".join(sentences)]
    return "\n".join(lines)


def test_the_word_stands_far_before_the_passage_s_end():
    found = list(last_words(paragraphs(text()), random.Random(0)))
    assert len(found) > 20
    for case in found:
        words = case["passage"].split()
        assert WORDS[0] <= len(words) < WORDS[1] and "=" not in words
        assert case["word"] in words[: len(words) + 1 - DISTANCE]


def test_the_same_seed_asks_the_same():
    found = [list(last_words(paragraphs(text()), random.Random(seed))) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


@pytest.mark.full
def test_lm_eval_reads_what_it_writes(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from calib.evaluate.lm_eval.named_task import NamedTask, known_tasks

    (tmp_path / "text.txt").write_text(text())
    written(tmp_path, "text.txt").check_returncode()
    cases = [json.loads(line) for line in (tmp_path / "last_word.jsonl").read_text().splitlines()]
    task = NamedTask(known_tasks(str(tmp_path), ("last_word",)), "last_word", 0, None, 0)
    asked = [request.args for request in task.requests()["loglikelihood"]]
    assert asked == [(case["passage"], f" {case['word']}") for case in cases] and len(cases) == 5
    assert task.metrics == ["accuracy", "perplexity"]


@pytest.mark.full
def test_a_text_without_a_case_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("One sentence. Another.")
    assert "give a longer text" in written(tmp_path, "text.txt").stderr and not (tmp_path / "last_word.yaml").exists()


def written(folder, text):
    """Run the script on the file `text` in `folder`."""
    arguments = ["--output", folder, "--text", folder / text, "--cases", "5"]
    return subprocess.run([sys.executable, "-m", "benchmarks.last_word", *arguments], capture_output=True, text=True)
