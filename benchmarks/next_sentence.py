"""A task for lm-eval that needs no hub: which of four sentences follows a passage of running text.

    python benchmarks/next_sentence.py --output runs/next_sentence [--text wiki.test.raw] [--cases 200]

Passages are of WikiText-2's test split, or of a file: 12 sentences at least, and the first part of a paragraph. The wrong
sentences are of the paragraphs behind it, mostly of the same article, so that the topic alone does not tell. Writes
`cases.jsonl` and `next_sentence.yaml`, which lm-eval reads by `include_path`.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from calib.documents.corpus import TextSource

SENTENCES = 12  # of a passage at least
WORDS = (8, 40)  # of a sentence that is asked about
CHOICES = 4
SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"(])")
TASK = """task: next_sentence
dataset_path: json
dataset_kwargs:
  data_files:
    test: {cases}
output_type: multiple_choice
test_split: test
num_fewshot: 0
doc_to_text: "{{{{passage}}}}"
doc_to_choice: "{{{{sentences}}}}"
doc_to_target: "{{{{right}}}}"
metric_list:
  - {{metric: acc}}
metadata: {{version: 1}}
"""


def paragraphs(text: str) -> list[list[str]]:
    """The sentences of each paragraph that is no heading."""
    lines = (line.strip() for line in text.splitlines())
    return [SENTENCE.split(line) for line in lines if line and not line.startswith("=")]


def cases(text: str, count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Passage, sentences to choose from, and which is right: in an order that depends on the seed alone."""
    draw, found = random.Random(seed), paragraphs(text)
    places = [at for at in range(len(found) - CHOICES) if sum(map(len, found[at - 3 : at + 1])) > SENTENCES]
    draw.shuffle(places)
    for at in places:
        before = [sentence for paragraph in found[max(0, at - 3) : at] for sentence in paragraph]
        own = [n for n in range(1, len(found[at])) if len(before) + n >= SENTENCES and _fits(found[at][n])]
        others = [
            sentence
            for paragraph in found[at + 1 : at + 1 + 2 * CHOICES]
            for sentence in paragraph[1:]
            if _fits(sentence)
        ]
        if not own or len(others) < CHOICES - 1:
            continue
        cut = draw.choice(own)
        sentences = [found[at][cut], *draw.sample(others, CHOICES - 1)]
        order = draw.sample(range(CHOICES), CHOICES)
        yield {
            "passage": " ".join(before[cut - SENTENCES :] + found[at][:cut])
            if cut < SENTENCES
            else " ".join(found[at][:cut]),
            "sentences": [sentences[n] for n in order],
            "right": order.index(0),
        }
        count -= 1
        if not count:
            return


def _fits(sentence: str) -> bool:
    return WORDS[0] <= len(sentence.split()) <= WORDS[1]


def main() -> None:
    """Writes the task and its cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="a file of running text, in place of the hub's")
    parser.add_argument("--cases", type=int, default=200)
    asked = parser.parse_args()
    source = (
        {"text": [asked.text]}
        if asked.text
        else {"name": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}
    )
    text = TextSource(**source, natural_spacing=True).read()
    asked.output.mkdir(parents=True, exist_ok=True)
    made = [json.dumps(case) + "\n" for case in cases(text, asked.cases)]
    (asked.output / "cases.jsonl").write_text("".join(made))
    (asked.output / "next_sentence.yaml").write_text(TASK.format(cases=(asked.output / "cases.jsonl").resolve()))
    print(f"{len(made)} cases in {asked.output}")


if __name__ == "__main__":
    main()
