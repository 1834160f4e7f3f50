"""Writes the page about a model's keys and attention: what it can and cannot stand for.

    python -m benchmarks.key_profile.page artifacts/tiny-llama --text FILE [--compare DIR ...] --output docs/results/tiny_llama.md

Sequences of 512 tokens of the text, and keyed lines of the eval split in the style of the retrieval cases, each behind
the tokenizer's first token. `--compare` sets other local models beside it, each measured with its own tokenizer.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.key_profile.profile import LEAST_SEEN, LayerProfile, profile
from benchmarks.key_profile.words import mass_words, outlier_words, rank_words, sink_words
from calib.capture.language_model import load
from calib.documents.corpus import TextSource
from calib.documents.generators import keyed_lines, keyed_random
from calib.errors import UsageError

LENGTH = 512
SEQUENCES = 8
STATES = (
    "| layer | largest key channel / median, before RoPE | after RoPE | key channels above 3 medians, before RoPE | after RoPE "
    "| largest value channel / median | effective rank of keys, before RoPE | after RoPE | directions with 90 % of the keys' "
    "variance, before RoPE | after RoPE |\n" + "|---" * 10 + "|"
)
ATTENTION = "| layer | on the first token | on the top 1 % of tokens | on the top 5 % | on the top 10 % |\n|---|---|---|---|---|"


def text_sequences(tokenizer: PreTrainedTokenizerBase, text: str, first: int) -> Tensor:
    """int64 [8, 512] from positions spread evenly over the text, each behind the token `first`."""
    size = 8 * LENGTH  # characters: more than tokenizers need for prose
    positions = [round(index * (len(text) - size) / (SEQUENCES - 1)) for index in range(SEQUENCES)]
    return rows(tokenizer, [text[max(0, position) : position + size] for position in positions], first)


def list_sequences(tokenizer: PreTrainedTokenizerBase, first: int) -> Tensor:
    """int64 [8, 512] of keyed lines, each behind the token `first`."""
    texts = []
    for index in range(SEQUENCES):
        pieces = keyed_lines(keyed_random("key page", index), LENGTH // 6, queries=0, split="eval")
        texts.append("".join(piece.text for piece in pieces))
    return rows(tokenizer, texts, first)


def rows(tokenizer: PreTrainedTokenizerBase, texts: list[str], first: int) -> Tensor:
    """The first 511 tokens of each text behind `first`; UsageError where a text is shorter."""
    cut = {"add_special_tokens": False, "truncation": True, "max_length": LENGTH - 1}
    ids = [tokenizer(text, **cut)["input_ids"] for text in texts]
    if min(map(len, ids)) < LENGTH - 1:
        raise UsageError(f"a text gives {min(map(len, ids)) + 1} tokens: {LENGTH} are needed; give a longer text")
    return torch.tensor([[first, *some] for some in ids])


def state_row(p: LayerProfile) -> str:
    """One layer's keys and values as a row of the table."""
    before = p.before
    cells = [
        str(p.layer),
        f"{before.largest:.1f}" if before else "",
        f"{p.keys.largest:.1f}",
        f"{before.outliers:.1%}" if before else "",
        f"{p.keys.outliers:.1%}",
        f"{p.values.largest:.1f}",
        f"{before.rank:.0f} of {p.head_dim}" if before else "",
        f"{p.keys.rank:.0f} of {p.head_dim}",
        f"{before.directions:.0f}" if before else "",
        f"{p.keys.directions:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def attention_row(p: LayerProfile) -> str:
    """One layer's attention as a row of the table."""
    return f"| {p.layer} | {p.sink:.1%} | {' | '.join(f'{share:.1%}' for share in p.top)} |"


def section(name: str, kind: str, layers: list[LayerProfile]) -> str:
    """One model on one kind of text: two tables, then words."""
    states = "\n".join([STATES, *map(state_row, layers)])
    attention = "\n".join([ATTENTION, *map(attention_row, layers)])
    traits = (outlier_words(layers), sink_words(layers, LENGTH), mass_words(layers), rank_words(layers))
    return (
        f"## {name} on {kind}\n\n{states}\n\nShare of the attention:\n\n{attention}\n\n"
        + "\n".join(f"- {words}" for words in traits)
        + "\n"
    )


def page(folders: list[Path], text: str, label: str, command: str) -> str:
    """The page for the models in `folders`, the first one's name in the title."""
    parts = [
        f"# What the keys of {folders[0].name} look like\n",
        f"Everything on this page was written by `{command}`.\n",
        f"{SEQUENCES} sequences of {LENGTH} tokens of {label} and as many of keyed lines (`line word: 1234`), float32. "
        f"A channel's magnitude is its mean |x|. Shares of the attention are means over the queries that see at least {LEAST_SEEN} "
        "tokens. Effective rank is exp of the entropy of the singular values of the centred keys (Roy and Vetterli 2007), mean "
        "over KV heads. All definitions are in `benchmarks/key_profile/profile.py`. The sentences under a table are chosen by its "
        "numbers. They hold for this model on this text and say nothing about larger models.\n",
    ]
    for folder in folders:
        model, tokenizer = load(str(folder), "float32")
        first = tokenizer.bos_token_id
        if first is None:
            raise UsageError(f"the tokenizer in {folder} has no first token (<s>): attention sinks need one")
        for kind, sequences in (
            (label, text_sequences(tokenizer, text, first)),
            ("keyed lines", list_sequences(tokenizer, first)),
        ):
            parts.append(section(folder.name, kind, profile(model, sequences)))
    return "\n".join(parts)


def main() -> None:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.key_profile.page", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path, help="a model's folder")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out text files")
    parser.add_argument("--compare", type=Path, nargs="*", default=[], help="other local models' folders")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    arguments = parser.parse_args()
    source, models = TextSource(text=arguments.text), [arguments.model, *arguments.compare]
    command = (
        f"python -m benchmarks.key_profile.page artifacts/{arguments.model.name} --text {source.label.replace(',', '')}"
    )
    if arguments.compare:
        command += f" --compare {' '.join(folder.name for folder in arguments.compare)}"
    written = page(models, source.read(), source.label, f"{command} --output docs/results/{arguments.output.name}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
