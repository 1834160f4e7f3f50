"""Removes the ids of tokens that a GGUF file does not name. transformers then keeps those of the configuration's class, such as 1
and 2 of a Llama, which are other tokens of the file's vocabulary: texts would begin or end at them."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.capture.model_files import ModelFiles

ENDS = ("bos_token_id", "eos_token_id")
# The tokenizer for which a file may leave them out: 1 and 2 of SentencePiece, by llama.cpp's own rule.
SENTENCEPIECE = "llama"


def without_unnamed_tokens(found: ModelFiles, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Sets the ids of first and last tokens in the model's configurations to None if neither a GGUF file nor its tokenizer has
    them."""
    absent = [name for name in ENDS if getattr(tokenizer, name) is None]
    if found.gguf is None or not absent:
        return
    from gguf import GGUFReader

    fields = GGUFReader(Path(found.path) / found.gguf).fields
    kind = fields.get("tokenizer.ggml.model")
    if kind is not None and kind.contents() == SENTENCEPIECE:
        return
    for name in absent:
        if f"tokenizer.ggml.{name}" not in fields:
            for config in (model.config, model.config.get_text_config(decoder=True), model.generation_config):
                setattr(config, name, None)
