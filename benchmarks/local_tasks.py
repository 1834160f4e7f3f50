"""Two tasks for lm-eval that need no hub, of running text: a passage's last word, and which of four sentences follows a passage.

    python benchmarks/local_tasks.py --output runs/local_tasks [--text wiki.test.raw] [--cases 100]

Text is WikiText-2's test split, or a file. Passages end within a paragraph and begin up to three paragraphs before it.

- `last_word` (after LAMBADA, Paperno et al. 2016): the word stands in the passage, a hundred words before its end or earlier, so that
  a cache has to have kept it.
- `next_sentence`: the wrong sentences are of the paragraphs behind the passage, mostly of the same article.

Writes `TASK.jsonl` and `TASK.yaml`, which lm-eval reads by `include_path`.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from calib.documents.corpus import TextSource

BEFORE = 3  # paragraphs
WORDS = (150, 300)  # of a passage
DISTANCE = 100  # words between the last word and where it stood before
SENTENCE = (8, 40)  # words of a sentence that is asked about
CHOICES = 4
END_OF_SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"(])")
WORD = re.compile(r"[A-Z]?[a-z]{4,}")

HEAD = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {cases}
test_split: test
num_fewshot: 0
doc_to_text: "{{{{passage}}}}"
metadata: {{version: 1}}
"""
TASKS = {
    "last_word": """output_type: loglikelihood
doc_to_target: " {{word}}"
metric_list:
  - {metric: acc}
  - {metric: perplexity}
""",
    "next_sentence": """output_type: multiple_choice
doc_to_choice: "{{sentences}}"
doc_to_target: "{{right}}"
metric_list:
  - {metric: acc}
""",
}

Case = dict[str, object]
Paragraphs = list[list[str]]


def paragraphs(text: str) -> Paragraphs:
    """The sentences of each paragraph that is no heading."""
    lines = (line.strip() for line in text.splitlines())
    return [END_OF_SENTENCE.split(line) for line in lines if line and not line.startswith("=")]


def last_words(found: Paragraphs, draw: random.Random) -> Iterator[Case]:
    """A passage without its last word, and the word: of a word that ends a sentence."""
    for at in shuffled(range(BEFORE, len(found)), draw):
        for last in shuffled(range(len(found[at])), draw):
            words = " ".join(passage(found, at, last + 1)).removesuffix(".").split()
            if len(words) > WORDS[0] and WORD.fullmatch(words[-1]) and words[-1] in words[:-DISTANCE]:
                yield {"passage": " ".join(words[:-1]), "word": words[-1]}
                break


def next_sentences(found: Paragraphs, draw: random.Random) -> Iterator[Case]:
    """A passage, sentences to choose from, and which is right."""
    for at in shuffled(range(BEFORE, len(found) - 2 * CHOICES), draw):
        own = [n for n in range(1, len(found[at])) if fits(found[at][n])]
        later = found[at + 1 : at + 1 + 2 * CHOICES]
        wrong = [sentence for paragraph in later for sentence in paragraph[1:] if fits(sentence)]
        if not own or len(wrong) < CHOICES - 1:
            continue
        cut = draw.choice(own)
        words = " ".join(passage(found, at, cut)).split()
        if len(words) < WORDS[0]:
            continue
        sentences = [found[at][cut], *draw.sample(wrong, CHOICES - 1)]
        order = draw.sample(range(CHOICES), CHOICES)
        yield {"passage": " ".join(words), "sentences": [sentences[n] for n in order], "right": order.index(0)}


def passage(found: Paragraphs, at: int, end: int) -> list[str]:
    """The last sentences before sentence `end` of a paragraph, the paragraphs before it included, as many as `WORDS` allows."""
    sentences = [sentence for paragraph in found[at - BEFORE : at] for sentence in paragraph] + found[at][:end]
    while sum(len(sentence.split()) for sentence in sentences) > WORDS[1]:
        sentences.pop(0)
    return sentences


def shuffled(numbers: range, draw: random.Random) -> list[int]:
    """All of them, in the seed's order."""
    return draw.sample(numbers, len(numbers))


def fits(sentence: str) -> bool:
    """Neither a fragment nor a paragraph."""
    return SENTENCE[0] <= len(sentence.split()) <= SENTENCE[1]


def main() -> None:
    """Writes the tasks and their cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="a file of running text, in place of the hub's")
    parser.add_argument("--cases", type=int, default=100, help="of each task, at most")
    asked = parser.parse_args()
    hub = {"name": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}
    text = TextSource(**({"text": [asked.text]} if asked.text else hub), natural_spacing=True).read()
    found = paragraphs(text)
    asked.output.mkdir(parents=True, exist_ok=True)
    for name, cases in (("last_word", last_words), ("next_sentence", next_sentences)):
        lines = [json.dumps(case) + "\n" for case in islice(cases(found, random.Random(0)), asked.cases)]
        path = (asked.output / f"{name}.jsonl").resolve()
        path.write_text("".join(lines))
        (asked.output / f"{name}.yaml").write_text(HEAD.format(name=name, cases=path) + TASKS[name])
        print(f"{len(lines)} cases of {name} in {asked.output}")


if __name__ == "__main__":
    main()
