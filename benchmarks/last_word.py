"""Writes a task for lm-eval that needs no hub: predict the last word of a passage, which also occurs far earlier in it.

    python -m benchmarks.last_word --output runs/last_word [--text wiki.test.raw] [--cases 100]

After LAMBADA (Paperno et al. 2016), on WikiText-2's test split or a file of running text. A passage has 150 to 300 words and ends
with a sentence; the word occurs at least a hundred words before its end, so that a cache must have kept it. Writes
`last_word.jsonl` and `last_word.yaml`, which lm-eval reads by `include_path`.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from calib.documents.corpus import TextSource

BEFORE = 3  # earlier paragraphs from which a passage may take sentences
WORDS = (150, 300)  # least and most words of a passage
DISTANCE = 100  # least distance in words between the last word and an earlier occurrence
END_OF_SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"(])")
WORD = re.compile(r"[A-Z]?[a-z]{4,}")

TASK = """task: last_word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {cases}
test_split: test
num_fewshot: 0
output_type: loglikelihood
doc_to_text: "{{{{passage}}}}"
doc_to_target: " {{{{word}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
metadata: {{version: 1}}
"""


def paragraphs(text: str) -> list[list[str]]:
    """Returns the sentences of each paragraph that is no heading."""
    lines = (line.strip() for line in text.splitlines())
    return [END_OF_SENTENCE.split(line) for line in lines if line and not line.startswith("=")]


def last_words(found: list[list[str]], draw: random.Random) -> Iterator[dict[str, str]]:
    """Yields passages without their last word, and the word; at most one that ends in each paragraph."""
    for at in shuffled(range(BEFORE, len(found)), draw):
        for last in shuffled(range(len(found[at])), draw):
            words = " ".join(passage(found, at, last + 1)).removesuffix(".").split()
            if len(words) > WORDS[0] and WORD.fullmatch(words[-1]) and words[-1] in words[:-DISTANCE]:
                yield {"passage": " ".join(words[:-1]), "word": words[-1]}
                break


def passage(found: list[list[str]], at: int, end: int) -> list[str]:
    """Returns the last sentences before sentence `end` of paragraph `at`, earlier paragraphs included, as many as `WORDS`
    allows."""
    sentences = [sentence for paragraph in found[at - BEFORE : at] for sentence in paragraph] + found[at][:end]
    while sum(len(sentence.split()) for sentence in sentences) > WORDS[1]:
        sentences.pop(0)
    return sentences


def shuffled(numbers: range, draw: random.Random) -> list[int]:
    """Returns all numbers in random order."""
    return draw.sample(numbers, len(numbers))


def main() -> None:
    """Writes the task and its cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="a file of running text, instead of the hub's")
    parser.add_argument("--cases", type=int, default=100)
    asked = parser.parse_args()
    hub = {"name": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}
    text = TextSource(**({"text": [asked.text]} if asked.text else hub), natural_spacing=True).read()
    found = list(islice(last_words(paragraphs(text), random.Random(0)), asked.cases))
    if not found:
        parser.error(
            f"no passage of {asked.text or hub['name']} ends with a word that stands in it before; give a longer text"
        )
    asked.output.mkdir(parents=True, exist_ok=True)
    cases = (asked.output / "last_word.jsonl").resolve()
    cases.write_text("".join(json.dumps(case) + "\n" for case in found))
    (asked.output / "last_word.yaml").write_text(TASK.format(cases=cases))
    print(f"{len(found)} cases in {asked.output}")


if __name__ == "__main__":
    main()
