"""Checks the sizes in a model's configuration before a model is built from it, as a config.json may hold anything."""

from typing import Any

from calib.errors import UsageError
from calib.runtime.messages.printable import printable

# Ranges far wider than any model's: a value outside is from a damaged or made-up file, and building it could take hours.
SIZES = {
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (1, 2**16),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**24),
    "vocab_size": (1, 2**26),
    "max_position_embeddings": (1, 2**40),
    "sliding_window": (0, 2**40),
}


def check_sizes(config: Any, path: str) -> None:
    """Raises UsageError, with field, value and range, for an impossible size in the decoder's configuration of model `path`."""
    decoder = config.get_text_config(decoder=True)
    for name, (least, most) in SIZES.items():
        value = getattr(decoder, name, None)
        several = value if isinstance(value, list | tuple) else [value]  # some architectures have a list over layers
        for one in several:
            if one is not None and (type(one) is not int or not least <= one <= most):
                raise UsageError(
                    f"the model in '{path}' has {name} = {printable(one)} in its config.json: must be a whole number "
                    f"{least} ... {most}; take the folder of a model that transformers has saved"
                )
    heads, kv_heads = (getattr(decoder, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if type(heads) is int and type(kv_heads) is int and heads % kv_heads:
        raise UsageError(
            f"the model in '{path}' has num_attention_heads = {heads} and num_key_value_heads = {kv_heads} in its config.json: "
            "the first must be a multiple of the second"
        )
