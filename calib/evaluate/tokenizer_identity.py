"""What a tokenizer makes of text, in one hash: two of the same vocabulary may still part words otherwise."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from calib.runtime.files.canonical_json import plain, sha256

# Words, numbers, spaces in front and in a row, marks, line breaks, letters beyond ASCII: where tokenizers differ.
SAMPLE = "line rain: 4821 / the  quick-brown FOX isn't 1,190.5 \u2014 na\u00efve \u6c34\n\n\tdef f(x):\n    return x**2 != 0\n"


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary and of a sample's tokens, with the special ones that stand around them."""
    content: dict[str, Any] = {
        "vocabulary": dict(tokenizer.get_vocab()),
        "sample": [list(tokenizer(SAMPLE, add_special_tokens=special)["input_ids"]) for special in (True, False)],
    }
    return sha256(plain(content, "tokenizer"))
