"""Converts a GGUF file to a checkpoint folder with weights dequantised to float32 and an equivalent tokenizer.

The folder loads in a fraction of the time, and has the same weights: a calibration on it also fits the file.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from calib.capture.language_model import load, without_notes
from calib.capture.model_files import GGUF
from calib.convert.checkpoint import checkpoint_folder
from calib.errors import RunError, UsageError
from calib.runtime.messages.printable import printable

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SAMPLES, LONGEST = 500, 24  # number of random texts that both tokenizers must encode equally, and most tokens of each
TEXTS = (
    "Hello, world! It's 2024; don't split 3.14159 or 1,000,000 otherwise.",
    "  two  spaces,\ttabs\t\tand\nnew\r\n\r\nlines   ",
    "def f(x):\n    return {x: [y**2 for y in range(10)]}  # code",
    "Zażółć gęślą jaźń — naïve café, 日本語のテキスト, عربى, Ελληνικά, 👩‍👩‍👧 🏳️‍🌈",
    "CamelCase snake_case kebab-case http://example.org/a?b=c&d=%20#e",
)


def convert(source: Path, output: Path) -> None:
    """Writes the model in the file `source` into the new folder `output`, tokenizer included.

    Raises:
        UsageError: no GGUF file, one that transformers cannot read, an `output` that exists.
        RunError: a tokenizer that differs after it was written and loaded, a folder that cannot be written.
    """
    if not source.is_file() or source.suffix != GGUF:
        raise UsageError(f"'{source}' is no {GGUF} file; name the file itself")
    with checkpoint_folder(output) as folder:
        model, tokenizer = load(str(source), "float32")
        with without_notes():
            model.save_pretrained(folder)
            plain_tokenizer(tokenizer).save_pretrained(folder)
            check_tokenizer(tokenizer, AutoTokenizer.from_pretrained(folder), source)


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Returns the same vocabulary, rules, special tokens and chat template as a `PreTrainedTokenizerFast`.

    The tokenizer class of a model family would rebuild the rules from files that a GGUF file does not have.
    """
    named = {name: getattr(tokenizer, name) for name in NAMED if getattr(tokenizer, name, None) is not None}
    longest = {"model_max_length": tokenizer.model_max_length}
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **named, **longest)
    plain.chat_template = tokenizer.chat_template
    return plain


def check_tokenizer(own: PreTrainedTokenizerBase, written: PreTrainedTokenizerBase, source: Path) -> None:
    """Raises RunError if the written tokenizer differs from the file's in size, special tokens, template or any test text."""
    named = [name for name in NAMED if getattr(own, name, None) is not None]
    remedy = f"give the file itself: --model.path {source}"
    for what, of in (
        ("tokens", len),
        ("special tokens", lambda tokenizer: {name: getattr(tokenizer, name, None) for name in named}),
        ("chat template", lambda tokenizer: tokenizer.chat_template),
    ):
        expected, found = of(own), of(written)
        if expected != found:
            raise RunError(
                f"'{source}': its tokenizer has the {what} {printable(expected)}, "
                f"and the written one {printable(found)}; {remedy}"
            )
    for text in texts(own):
        expected, found = own(text).input_ids, written(text).input_ids
        if expected != found or own.decode(expected) != written.decode(found):
            raise RunError(f"'{source}': the written tokenizer reads {printable(text)} differently; {remedy}")


def texts(tokenizer: Any) -> Iterator[str]:
    """Yields test texts for many tokenizer rules: words, spaces, code, scripts, every special token, random tokens."""
    yield from TEXTS
    yield from (f"a{token} b" for token in tokenizer.all_special_tokens)
    draw = random.Random(0)
    for _ in range(SAMPLES):
        yield tokenizer.decode([draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, LONGEST))])
