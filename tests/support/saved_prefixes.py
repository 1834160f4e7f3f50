"""Saved caches split into parts that tests change and join again with correct checksums; and intact ones of every kind."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import BY_NAME
from forged_artifact import join, split
from toy_models import left_padded, random_model

from calib.runtime.files import canonical_json
from calib.runtime.prefix.file import KEY, crc32

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class File:
    """A saved cache in parts: its JSON document and its tensors by name. `header` edits change the safetensors header, `raw` edits
    the bytes of the joined file."""

    document: Any
    tensors: dict[str, torch.Tensor]
    seals: bool = True  # whether `data` computes correct checksums
    header: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    raw: list[Callable[[bytes], bytes]] = field(default_factory=list)

    @staticmethod
    def of(data: bytes) -> "File":
        """Split an intact file into its parts."""
        header, body = split(data)
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                flat = torch.frombuffer(bytearray(body[start:stop]) or bytearray(1), dtype=torch.uint8)[: stop - start]
                tensors[name] = flat.view(DTYPES[entry["dtype"]]).view(entry["shape"]).clone()
        return File(json.loads(header["__metadata__"][KEY]), tensors)

    def data(self) -> bytes:
        """Join the parts and return the file's bytes."""
        document = self.document
        if self.seals and isinstance(document, dict):
            document["crc32"] = crc32(self.tensors)
            document.pop("sha256", None)
            document["sha256"] = canonical_json.sha256(document)
        header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(document, sort_keys=True, separators=(",", ":"))}}
        parts, at = [], 0
        for name, tensor in self.tensors.items():
            part = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
            header[name] = entry | {"data_offsets": [at, at + len(part)]}
            parts.append(part)
            at += len(part)
        for change in self.header:
            change(header)
        data = join(header, b"".join(parts))
        for edit in self.raw:
            data = edit(data)
        return data


# (case, family, factor on keys and values): every store and codec, models with some or only sliding-window layers, and values so
# large that parameters need float32.
BASES = [
    *(
        (case, "llama", 1.0)
        for case in ("full", "rtn-4", "kivi-2-short", "kivi-2-calibrated", "kivi-corrected", "offload")
    ),
    *((case, "llama", 1.0) for case in ("zipcache-short", "zipcache-corrected", "zipcache-evicting", "h2o")),
    *((case, "llama", 1.0) for case in ("mikv-16-2", "mikv-corrected", "streaming_llm", "streaming_llm-original")),
    *((case, "llama", 1.0) for case in ("infllm", "specache", "specache-late", "klt-short", "klt-tiers")),
    *((case, "llama", 1.0) for case in ("gear", "gear-60", "gear-paper", "gear-calibrated", "outlier_reduced")),
    *((case, "llama", 1.0) for case in ("csr-short", "csr-both", "csr-tiers", "csr-paper", "csr-corrected")),
    *((case, "qwen3-mixed", 1.0) for case in ("kivi-2-short", "zipcache-short", "specache")),
    *((case, "mistral-sliding", 1.0) for case in ("kivi-2-short", "csr-tiers", "mikv-8-2", "infllm-original")),
    *((case, "llama", 1e6) for case in ("rtn-4", "zipcache-corrected", "mikv-16-2", "gear", "csr-short")),
]


@dataclass(frozen=True)
class Base:
    """An intact saved cache, the model that made it and the case that opens it."""

    case: Any
    model: Any
    data: bytes

    @staticmethod
    def saved(case: str, family: str, magnitude: float, folder: Any, storage_bits: float | None = None) -> "Base":
        """Save a cache of two rows, one of them padded, after some decode steps; `storage_bits` is passed to `save`."""
        model, path = random_model(family), folder / f"{case}-{family}-{magnitude}.safetensors"
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.data *= magnitude
            layer.self_attn.v_proj.weight.data *= magnitude
        inputs = left_padded([150, 70])
        with BY_NAME[case].open(model) as cache:
            first = model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False)
            cache.save(path, input_ids=first[:, :-1], storage_bits=storage_bits)
        return Base(BY_NAME[case], model, path.read_bytes())
