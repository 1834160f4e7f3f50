"""The trained model as a folder that `transformers` loads; its model card's figures are measured on that folder."""

import copy
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from calib.errors import UsageError
from calib.testbed.language_model import LanguageModel
from calib.testbed.pretraining_data import PretrainingData
from calib.testbed.scores import scores

LICENCES = {  # of the text, by a word in the source's name
    "wiki": "WikiText-2 (Wikipedia text, Merity et al. 2016): CC BY-SA 3.0",
    "tinystories": "TinyStories (Eldan and Li 2023): CDLA-Sharing-1.0",
}


def export(module: LanguageModel, data: PretrainingData, folder: Path, steps: int, cases: int = 200) -> str:
    """Writes config, tokenizer, float16 safetensors, generation config and model card to `folder`; returns the card.

    Everything is written beside the folder first, so an interruption leaves the old export or none. `cases` is the
    number of retrieval cases behind each figure. Raises UsageError when `folder` holds something that is not a model.
    """
    check_output(folder)
    data.setup()
    assert data.tokenizer is not None
    stage = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    half = copy.deepcopy(module.model).to(torch.float16)  # a copy: training may go on in float32
    half.save_pretrained(stage)
    data.tokenizer.save_pretrained(stage)
    for file in stage.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone
    shipped = AutoModelForCausalLM.from_pretrained(stage, dtype=torch.float32, local_files_only=True).eval()
    figures = scores(shipped, data.tokenizer, data.validation_source.read(), cases=cases)
    card = model_card(module, data, steps, cases, figures, folder.name)
    (stage / "README.md").write_text(card, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    stage.rename(folder)
    return card


def check_output(folder: Path) -> None:
    """Refuses to replace anything but an earlier export."""
    if folder.exists() and not (folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))):
        raise UsageError(f"{folder} exists and is not a model folder: name another one in --output")


def model_card(
    module: LanguageModel, data: PretrainingData, steps: int, cases: int, figures: dict[str, float], name: str
) -> str:
    """The README.md of an export."""
    p = module.hparams
    parameters = sum(weight.numel() for weight in module.model.parameters())
    tokens = sum(round(phase.share * steps) * phase.rows * phase.length for phase in data.phases)
    phases = "\n".join(
        f"| {phase.share:.0%} | {phase.rows} x {phase.length} | {phase.text:.0%} "
        f"| {(1 - phase.text) * phase.copying:.0%} | {(1 - phase.text) * (1 - phase.copying):.0%} |"
        for phase in data.phases
    )
    label = f"{data.train_source.label} {data.validation_source.label}".lower()
    licences = "\n".join(f"- {text}" for word, text in LICENCES.items() if word in label)
    validation = data.validation_source.text[0].name if data.validation_source.text else "FILE"
    retrieval = "\n".join(
        f"| exact answers, {key.split('_')[1]} lines ({cases} fresh cases) | {value:.3f} |"
        for key, value in figures.items()
        if key.startswith("retrieval")
    )
    return f"""---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
language: en
---
# {name}: a small Llama that looks things up in its context

{parameters:,} parameters: {p.layers} layers, hidden {p.hidden}, MLP {p.mlp}, {p.heads} query and {p.kv_heads} KV heads
of {p.head_dim}, RoPE theta {p.rope_theta:g}, tied embeddings, {p.positions} positions; byte-level BPE of {p.vocabulary}
tokens, every digit a token of its own. Weights are float16. It exists to measure what compression does to a KV cache:
small enough for two CPU cores, trained, with answers that are exactly right or wrong. It is no assistant and its prose
is not to be trusted.

## Training

{training_command(data)}

From random weights, seed {data.seed}, {steps:,} steps, {tokens / 1e6:.1f} million tokens. AdamW {tuple(p.betas)},
learning rate {p.learning_rate:g} after {p.warmup_steps} steps of warm-up, cosine to {p.final_fraction:.0%}, weight
decay {p.weight_decay:g}. Text: {data.train_source.label}. Generated documents: `calib.testbed.generators`; their loss
is on the answers only, and pairs of key and number are split between training and evaluation.

| share of steps | rows x tokens | language | copying | keyed lines |
|---|---|---|---|---|
{phases}

Sources of the text and their licences:

{licences or "- named above; their licences are those of the sources"}

## Measured

On this folder's weights, in float32. Retrieval: keyed lines `line word: 1234`, one query, all four digits right under
greedy decoding. Perplexity: {data.validation_source.label}, windows of 512 tokens{spacing_note(data)}.

| | |
|---|---|
{retrieval}
| perplexity per token | {figures["perplexity"]:.2f} |
| bits per character | {figures["bits_per_character"]:.3f} |

    python -m calib.testbed.scores artifacts/{name} --text {validation} --cases {cases}
"""


def training_command(data: PretrainingData) -> str:
    """The command that made the model, indented; local files by name, in whatever folder they are."""
    lines = ["    calib pretrain --config configs/tiny_lm.yaml"]
    for key, source in (("train", data.train_source), ("validation", data.validation_source)):
        if source.text:
            lines.append(f"        --data.{key}.text '[{source.label}]'")
    return " \\\n".join(lines)


def spacing_note(data: PretrainingData) -> str:
    """Says when the text was respaced, since that changes the figures per token and per character."""
    return ", tokenised spacing taken back to written English" if data.validation_source.natural_spacing else ""
