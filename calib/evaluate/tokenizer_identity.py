"""A hash that identifies a tokenizer by its vocabulary and its tokens of a sample; equal vocabularies may split differently."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from calib.runtime.files.canonical_json import plain, sha256

# Cases in which tokenizers differ: numbers, leading and repeated spaces, punctuation, line breaks, letters beyond ASCII.
SAMPLE = "line rain: 4821 / the  quick-brown FOX isn't 1,190.5 \u2014 na\u00efve \u6c34\n\n\tdef f(x):\n    return x**2 != 0\n"


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the SHA-256 of the vocabulary and of a sample's tokens, with and without special tokens."""
    content: dict[str, Any] = {
        "vocabulary": dict(tokenizer.get_vocab()),
        "sample": [list(tokenizer(SAMPLE, add_special_tokens=special)["input_ids"]) for special in (True, False)],
    }
    return sha256(plain(content, "tokenizer"))
