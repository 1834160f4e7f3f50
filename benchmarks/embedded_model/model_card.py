"""The model card of an exported folder: its training record in words, and figures measured on its weights.

python -m benchmarks.embedded_model.model_card artifacts/tiny-llama --text VALIDATION --trigram TRAIN     measures and rewrites it
"""

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks.embedded_model.scores import CASES, SEED, load, scores
from benchmarks.embedded_model.training_record import Run, earlier_runs
from calib.documents.corpus import TextSource
from calib.errors import UsageError

LICENCES = {  # of the text, by a word in the source's name
    "wiki": "WikiText-2 (Wikipedia text, Merity et al. 2016): CC BY-SA 3.0",
    "tinystories": "TinyStories (Eldan and Li 2023): CDLA-Sharing-1.0",
}
HEAD = """---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
language: en
---
# {name}: a small Llama that looks things up in its context

{parameters:,} parameters: {layers} layers, hidden {hidden}, MLP {mlp}, {heads} query and {kv_heads} KV heads
of {head_dim}, RoPE theta {theta:g}, tied embeddings, {positions} positions; byte-level BPE of {vocabulary}
tokens, in which every digit is one token. Weights are float16. It exists to measure what compression does to a KV cache:
it is trained, small enough for two CPU cores, and its answers are exactly right or wrong. It is no assistant, and what it
writes is not reliable.

## Training
"""
MEASURED = """
## Measured

Measured with the weights in this folder, in float32. Shares of right answers have their 95 % confidence interval; an
answer is right if greedy decoding gives all four digits. The cases were not seen in training: none of their pairs of key
and number and no two of their neighbouring keys are in the generator's training documents (`calib.documents.splits`), and
the checkpoint was chosen on other cases. Perplexity: {validation}, windows of 512 tokens, with
tokenised spacing, if the text has any, replaced by that of written English; the checkpoint was chosen by the loss on some
of these windows. The trigram model (interpolated Kneser-Ney) has the same tokenizer and training text.

| measure | value | 95 % interval | cases |
|---|---|---|---|
{rows}

    python -m benchmarks.embedded_model.scores artifacts/{name} --text {validation_file} --trigram {train_files} --cases {cases}
"""


def write_card(folder: Path, text: str, train: str | None, cases: int = CASES) -> str:
    """Measures the model in `folder`, writes its README.md from that and its training record, and returns it.

    Raises UsageError for a folder without a training record.
    """
    runs = earlier_runs(folder)
    if not runs:
        raise UsageError(
            f"{folder} has no training record (training.json): benchmarks.embedded_model.pretrain writes one with the export"
        )
    model, tokenizer = load(folder)
    card = render(folder.name, model, runs, scores(model, tokenizer, text, train, SEED, cases), cases)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return card


def render(name: str, model: Any, runs: list[Run], figures: dict[str, Any], cases: int) -> str:
    """The card's text."""
    c, last = model.config, runs[-1]
    head = HEAD.format(
        name=name,
        parameters=sum(weight.numel() for weight in model.parameters()),
        layers=c.num_hidden_layers,
        hidden=c.hidden_size,
        mlp=c.intermediate_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        theta=c.rope_parameters["rope_theta"],
        positions=c.max_position_embeddings,
        vocabulary=c.vocab_size,
    )
    label = " ".join(f"{run['text']} {run['validation']}" for run in runs).lower()
    licences = "\n".join(f"- {text}" for word, text in LICENCES.items() if word in label)
    return (
        head
        + "\n".join(run_words(number, run) for number, run in enumerate(runs, start=1))
        + "\nSources of the text and their licences:\n\n"
        + (licences or "- named above; their licences are those of the sources")
        + "\n"
        + MEASURED.format(
            validation=last["validation"],
            rows="\n".join(row(name, value) for name, value in figures.items()),
            name=name,
            validation_file=last["validation"].replace(", ", " "),
            train_files=last["text"].replace(", ", " "),
            cases=cases,
        )
    )


def run_words(number: int, run: Run) -> str:
    """One run: what it began with, how it learned, what it cost, and its phases."""
    begin = f"from the weights of run {number - 1}, a fresh optimizer" if run["init"] else "from random weights"
    cost = f"{run['training_seconds'] / 60:.0f} minutes" if run["training_seconds"] else "time not recorded"
    note = f"\n{run['note']}\n" if run.get("note") else ""
    schedule = f"{run['warmup_steps']} steps of warm-up, cosine to {run['final_fraction']:.0%}"
    return f"""
### Run {number}: {begin}

{command(run)}

{run["date"]}, {run["hardware"]}, {cost} ({run["precision"]}). Seed {run["seed"]}, {run["steps"]:,} steps,
{run["tokens"] / 1e6:.1f} million tokens; exported: step {run["exported_step"]:,}. AdamW {tuple(run["betas"])}, learning rate
{run["learning_rate"]:g} after {schedule}, weight decay {run["weight_decay"]:g}.
Text: {run["text"]} (SHA-256 {run["text_sha256"][:16]}).
Generated documents are those of `calib.documents.generators`; their loss is that of the answers only.
{note}
The phases of the training, in order. *language* to *keyed lines*: shares of the rows. *digits*: lengths of the numbers,
one drawn for each row. *numbers as keys*: share of the rows of keyed lines whose keys are numbers instead of words.

| share of steps | rows x tokens | language | copying | needles | keyed lines | digits | numbers as keys |
|---|---|---|---|---|---|---|---|
{chr(10).join(phase_row(phase) for phase in run["phases"])}
"""


def command(run: Run) -> str:
    """The command that made the model, indented; local files by name, in whatever folder they are."""
    words = [f"--config benchmarks/embedded_model/{name}" for name in run["configs"]]
    words += [f"--init_from artifacts/{run['init']['name']}"] if run["init"] else []
    words += [f"--data.train.text '[{run['text']}]'", f"--data.validation.text '[{run['validation']}]'"]
    return "    python -m benchmarks.embedded_model.pretrain " + " \\\n        ".join(words)


def phase_row(phase: dict[str, Any]) -> str:
    """One phase as a row of the card's table; shares are of all rows, numbers as keys of the keyed lines."""
    rest = 1 - phase["text"]
    copying, needle = rest * phase["copying"], rest * phase["needle"]
    digits = ", ".join(map(str, phase["digits"]))
    return (
        f"| {phase['share']:.0%} | {phase['rows']} x {phase['length']} | {phase['text']:.0%} | {copying:.0%} "
        f"| {needle:.0%} | {rest - copying - needle:.0%} | {digits} | {phase['number_keys']:.0%} |"
    )


def row(name: str, value: Any) -> str:
    """One figure as a row of the card's table."""
    words = re.sub(r"depth (\d+) (\d+)$", r"depth \1 to \2 %", name.replace("_", " "))
    if isinstance(value, dict):
        return f"| {words} | {value['exact']:.3f} | {value['low']:.3f} to {value['high']:.3f} | {value['cases']} |"
    return f"| {words} | {value:.3f} | | |"


def main() -> None:
    """Measures and rewrites the card of an exported folder, and prints it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedded_model.model_card", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path, help="an exported folder")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out text files")
    parser.add_argument("--trigram", type=Path, nargs="+", required=True, help="training text files")
    parser.add_argument("--cases", type=int, default=CASES, help=f"cases behind each share (default {CASES})")
    arguments = parser.parse_args()
    text, train = TextSource(text=arguments.text).read(), TextSource(text=arguments.trigram).read()
    print(write_card(arguments.model, text, train, arguments.cases))


if __name__ == "__main__":
    main()
