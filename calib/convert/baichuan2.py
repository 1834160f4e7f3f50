"""Converts Baichuan2 7B (arXiv:2309.10305) to a Llama, whose layers are the same but for these differences:

1. `W_pack` [3 hidden, hidden] holds the projections of queries, keys and values one below the other: it is split in three.
2. The head divides each row of its weight by its length in every forward: the rows are divided once, in float32.
3. Rotary frequencies are stored: they are dropped, since a Llama computes them.

The 13B model has ALiBi instead of RoPE, which no Llama has.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from calib.capture.model_sizes import check_sizes
from calib.convert.checkpoint import checkpoint_folder, read, read_json, rewrite, shards
from calib.convert.sentencepiece_tokenizer import sentencepiece_tokenizer
from calib.errors import UsageError
from calib.runtime.messages.printable import shortened

ARCHITECTURE = "BaichuanForCausalLM"
NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
SAME = (*NUMBERS, "rms_norm_eps", "hidden_act")
OPTIONAL = ("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
LONGEST = 160  # characters of a reason of transformers
LEAST_LENGTH = 1e-12  # least length by which a row of the head is divided, as in torch.nn.functional.normalize


def convert(source: Path, output: Path) -> None:
    """Writes the checkpoint in `source` into the new folder `output`, tokenizer included.

    Raises:
        UsageError: no folder, another model, weights that are not safetensors, a damaged, unreadable or incomplete checkpoint,
            an `output` that exists.
        RunError: `output` cannot be written.
    """
    if not source.is_dir():
        raise UsageError(
            f"'{source}' is no folder; download the checkpoint first (hf download NAME --local-dir FOLDER)"
        )
    config = llama_config(read_json(source / "config.json"), source)
    shards(source)
    tokenizer = sentencepiece_tokenizer(source / "tokenizer.model", read_json(source / "tokenizer_config.json"))
    with torch.device("meta"), as_usage(source):
        expected = {name: list(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    with checkpoint_folder(output) as folder:
        rewrite(source, folder, as_llama, expected)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name in ("tokenizer.model", "generation_config.json"):
            if (source / name).is_file():
                (folder / name).write_bytes(read(source / name))


def llama_config(found: Mapping[str, Any], source: Path) -> LlamaConfig:
    """Returns a Llama configuration with the sizes in `found`; raises UsageError if that is not Baichuan2 7B's."""
    architectures = found.get("architectures")
    if architectures != [ARCHITECTURE] or found.get("quantization_config"):
        what = "quantised" if architectures == [ARCHITECTURE] else f"of {architectures}"
        raise UsageError(f"'{source}' is {what}, expected the plain weights of {ARCHITECTURE}; give Baichuan2 7B")
    # The 13B model's configuration has model_max_length, but no max_position_embeddings.
    if "max_position_embeddings" not in found or found.get("hidden_size") == 5120:
        raise UsageError(f"'{source}' has ALiBi instead of RoPE (the 13B model), which no Llama has; give Baichuan2 7B")
    for name in SAME:
        if name not in found or (name in NUMBERS and (type(found[name]) is not int or found[name] < 1)):
            raise UsageError(f"'{source / 'config.json'}': {name} is {found.get(name, 'not there')}; download it again")
    with as_usage(source):
        config = LlamaConfig(
            **{name: found[name] for name in (*SAME, *OPTIONAL) if name in found},
            num_key_value_heads=found["num_attention_heads"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            dtype=found.get("torch_dtype") or found.get("dtype"),
            architectures=["LlamaForCausalLM"],
        )
    check_sizes(config, str(source))
    return config


@contextmanager
def as_usage(source: Path) -> Iterator[None]:
    """Context that turns every error of transformers about a configuration into a UsageError."""
    try:
        yield
    except Exception as error:  # transformers raises many types for entries of a wrong type or value
        reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST)
        raise UsageError(
            f"'{source / 'config.json'}' is not the configuration of a model ({reason}); download it again"
        ) from error


def as_llama(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Returns the Llama tensors, by name, that replace one tensor of Baichuan2; none for stored rotary frequencies."""
    if name.endswith("rotary_emb.inv_freq"):
        return {}
    if weight.dim() != 2:  # another shape than expected, which `rewrite` refuses
        return {name: weight}
    if name == "lm_head.weight":
        rows = weight.float()
        return {name: (rows / rows.norm(dim=1, keepdim=True).clamp(min=LEAST_LENGTH)).to(weight.dtype)}
    if name.endswith("W_pack.weight"):
        names = (name.replace("W_pack", f"{stream}_proj") for stream in "qkv")
        return {each: part.clone() for each, part in zip(names, weight.chunk(3), strict=False)}
    return {name: weight}
