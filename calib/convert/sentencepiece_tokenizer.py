"""Rebuilds a SentencePiece byte pair encoding as a tokenizer of transformers that needs no remote code."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from calib.convert.sentencepiece_file import read_model
from calib.errors import UsageError
from calib.runtime.messages.printable import printable

SPACE = "▁"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def sentencepiece_tokenizer(path: Path, settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a SentencePiece model file.

    Args:
        path: the file.
        settings: the content of tokenizer_config.json: special tokens, `add_bos_token`, `add_eos_token` (false unless given),
            `model_max_length`, `chat_template`.

    Raises UsageError for a file from which the tokenizer cannot be rebuilt.
    """
    model = read_model(path)
    spec, prefix = model.normalizer_spec, model.normalizer_spec.add_dummy_prefix
    special = {name: content(name, settings[name]) for name in SPECIAL if settings.get(name)}
    unknown = next((piece.piece for piece in model.pieces if piece.type == piece.UNKNOWN), None)
    vocabulary = {piece.piece: token for token, piece in enumerate(model.pieces)}
    for name, token in special.items():
        if token not in vocabulary:  # it would be added, with a number that the model has no embedding for
            raise UsageError(
                f"tokenizer_config.json has the {name} {printable(token)}, which '{path}' does not have; download both again"
            )
    byte_fallback = model.trainer_spec.byte_fallback
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges(model.pieces), unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    gaps = ((r"\A +| +\z", ""), (" {2,}", " ")) if spec.remove_extra_whitespaces else ()
    stripped = [normalizers.Replace(Regex(gap), to) for gap, to in gaps]
    prefixed = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*stripped, *prefixed, normalizers.Replace(" ", SPACE)])
    first = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *first]
    )
    # User-defined pieces are matched whole in a text; pieces with spaces after these became U+2581.
    own = [piece.piece for piece in model.pieces if piece.type == piece.USER_DEFINED]
    if own and prefix:
        raise UsageError(
            f"'{path}' has user-defined tokens ({own[0]}) and puts a space in front of texts, which cannot be rebuilt "
            "together; give the tokenizer.model of Baichuan2"
        )
    tokenizer.add_tokens([AddedToken(text, normalized=SPACE in text) for text in own])
    around = [special.get(f"{end}_token") if settings.get(f"add_{end}_token") else None for end in ("bos", "eos")]
    if any(around):
        template = " ".join(token for token in (around[0], "$A", around[1]) if token)
        named = [(token, vocabulary[token]) for token in around if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    rest = {name: settings[name] for name in ("model_max_length", "chat_template") if settings.get(name)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="left", **special, **rest
    )


def merges(pieces: Iterable[Any]) -> list[tuple[str, str]]:
    """Returns the BPE merges in order of priority: every split of a piece in two pieces, pieces of the highest score first."""
    normal = [piece for piece in pieces if piece.type == piece.NORMAL]
    known = {piece.piece for piece in normal}
    return [
        (left, right)
        for text in (piece.piece for piece in sorted(normal, key=lambda piece: -piece.score))
        for left, right in ((text[:at], text[at:]) for at in range(1, len(text)))
        if left in known and right in known
    ]


def content(name: str, token: Any) -> str:
    """Returns the text of the special token `name`, given in tokenizer_config.json as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise UsageError(
            f"tokenizer_config.json has the {name} {printable(token)}, expected a text or an object with its content; download it "
            "again"
        )
    return text
