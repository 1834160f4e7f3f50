"""A toy Baichuan2 checkpoint in its publisher's format, and the logits of such a model, from the published architecture."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from models.published import BAICHUAN2
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, normalize, silu

LETTERS = [" ", *"\n.klmnrstpaeiou0123456789"]
JOINED = ["ka", "lo", "mi", "ne", "ru", "ta", "so", "pe", "▁ka", "▁lo", "kalo", "al"]
# (text, SentencePiece type) by token id: unknown, control and user-defined tokens, bytes, letters, then BPE pieces in merge order.
TOKENS = [
    ("<unk>", 2),
    ("<s>", 3),
    ("</s>", 3),
    ("<reserved_106>", 4),
    *((f"<0x{byte:02X}>", 6) for byte in range(256)),
    *((letter.replace(" ", "▁"), 1) for letter in LETTERS),
    *((piece, 1) for piece in JOINED),
]
SIZES = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = BAICHUAN2 | SIZES | {"vocab_size": len(TOKENS), "torch_dtype": "float32"}


def tensors() -> dict[str, Tensor]:
    """Random float32 weights under the publisher's names; rows of `lm_head` have very different norms."""
    draw = torch.Generator().manual_seed(3)
    hidden, mlp, layers = (CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * (1.5 * columns**-0.5)

    found = {"model.embed_tokens.weight": torch.randn(len(TOKENS), hidden, generator=draw)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.self_attn.W_pack.weight": matrix(3 * hidden, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{prefix}.self_attn.rotary_emb.inv_freq": frequencies(hidden // CONFIG["num_attention_heads"]),
            f"{prefix}.mlp.gate_proj.weight": matrix(mlp, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(mlp, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, mlp),
            f"{prefix}.input_layernorm.weight": 1 + 0.2 * torch.randn(hidden, generator=draw),
            f"{prefix}.post_attention_layernorm.weight": 1 + 0.2 * torch.randn(hidden, generator=draw),
        }
    found["model.norm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=draw)
    found["lm_head.weight"] = matrix(len(TOKENS), hidden) * torch.exp(torch.randn(len(TOKENS), 1, generator=draw))
    return found


def save(folder: Path, shards: int = 2, **changes: Any) -> Path:
    """Write the checkpoint into `folder` and return it; `changes` override its config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    weights = tensors()
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    positions = {name: names[number % shards] for number, name in enumerate(weights)}
    for shard in names:
        save_file({name: weights[name] for name, position in positions.items() if position == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": positions}))
    (folder / "tokenizer.model").write_bytes(sentencepiece())
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]},
        "tokenizer_class": "BaichuanTokenizer",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": True},
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
        "unk_token": {"__type": "AddedToken", "content": "<unk>", "normalized": True},
        "pad_token": {"__type": "AddedToken", "content": "<unk>", "normalized": True},
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The model's logits, float32 `[batch, tokens, vocabulary]`, computed from the published architecture; without padding."""
    x = embedding(tokens, weights["model.embed_tokens.weight"])
    batch, length, hidden = x.shape
    heads = CONFIG["num_attention_heads"]
    angles = torch.arange(length)[:, None] * frequencies(hidden // heads)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in range(CONFIG["num_hidden_layers"]):
        own = {name.split(".", 3)[3]: weight for name, weight in weights.items() if f"layers.{layer}." in name}
        packed = linear(rms(x, own["input_layernorm.weight"]), own["self_attn.W_pack.weight"])
        q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in packed.split(hidden, -1))
        q, k = (part * cos + half_rotated(part) * sin for part in (q, k))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden)
        x = x + linear(mixed, own["self_attn.o_proj.weight"])
        y = rms(x, own["post_attention_layernorm.weight"])
        y = silu(linear(y, own["mlp.gate_proj.weight"])) * linear(y, own["mlp.up_proj.weight"])
        x = x + linear(y, own["mlp.down_proj.weight"])
    return linear(rms(x, weights["model.norm.weight"]), normalize(weights["lm_head.weight"]))


def frequencies(channels: int) -> Tensor:
    """RoPE's frequencies, float32 `[channels / 2]`."""
    return 10000.0 ** -(torch.arange(0, channels, 2) / channels)


def half_rotated(x: Tensor) -> Tensor:
    """(-x2, x1), where x1 and x2 are the halves of the channels."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm: x divided by its root mean square, times the weight."""
    return weight * x * (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt()


def sentencepiece(algorithm: int = 2, characters: bytes = b"", prefix: int = 0) -> bytes:
    """`TOKENS` as a SentencePiece model file, by default with Baichuan2's settings: BPE with byte fallback, no space in front,
    spaces kept. The arguments change its algorithm, normalisation and prefix."""
    scores = [-max(0, number - len(TOKENS) + len(JOINED)) for number in range(len(TOKENS))]
    pieces = [
        delimited(1, delimited(1, text.encode()) + b"\x15" + struct.pack("<f", score) + whole(3, kind))
        for (text, kind), score in zip(TOKENS, scores, strict=True)
    ]
    trainer = whole(3, algorithm) + whole(35, 1)
    normaliser = (delimited(2, characters) if characters else b"") + whole(3, prefix) + whole(4, 0)
    return b"".join(pieces) + delimited(2, trainer) + delimited(3, normaliser)


def delimited(number: int, content: bytes) -> bytes:
    """A protobuf field of a string or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def whole(number: int, value: int) -> bytes:
    """A protobuf field of a whole number."""
    return varint(number << 3) + varint(value)


def varint(value: int) -> bytes:
    """A protobuf varint: seven bits a byte, the least significant first."""
    parts = [value & 127]
    while value := value >> 7:
        parts[-1] |= 128
        parts.append(value & 127)
    return bytes(parts)
