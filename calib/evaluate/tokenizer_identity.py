"""What identifies a tokenizer: a hash of its vocabulary and its tokens of a sample, as equal vocabularies may split differently,
and the ids of its special tokens, which end answers and are probes."""

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


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the ids of the special tokens by name (`eos_token`: 2), and of all of them (`all`), increasing."""
    named = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokenizer.special_tokens_map.items()}
    return {**named, "all": sorted(set(tokenizer.all_special_ids))}
