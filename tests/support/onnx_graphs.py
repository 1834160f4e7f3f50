"""Runs exported graphs in onnxruntime and the runtime's own stages, on a small artifact and inputs that are hard to round."""

import numpy as np
import torch
from toy_artifact import (
    CLIP_BITS,
    toy_artifact,
    toy_basis,
    toy_components,
    toy_dictionaries,
    toy_model,
    toy_predictions,
    toy_thresholds,
)

from calib.runtime.methods import Geometry
from calib.runtime.stages.codec.corrected import OVERFLOWED
from calib.runtime.stages.codec.encoded import encoded

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=32)
LAYER = 1
FORMS = ("32x1", "1x32", "1x*", "fixed", "scaled.1x32")
BASES = ("keys.residual.*x1.4", "values.residual.1x*.4", "keys.residual.*x*.4", "values.residual.*x*.4")


def small_artifact():
    """An artifact with random tensors of every kind that an exported method reads, for `GEOMETRY`."""
    draw = torch.Generator().manual_seed(5)
    shape = (GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    tensors = {}
    for stream in ("keys", "values"):
        tensors[f"{stream}.low"] = -3 - torch.rand(shape, generator=draw)
        tensors[f"{stream}.high"] = 3 + torch.rand(shape, generator=draw)
        for form in FORMS:
            tensors[f"{stream}.clip.{form}"] = 0.6 + 0.4 * torch.rand(*shape[:2], len(CLIP_BITS), generator=draw)
    for name in ("values.scale", "keys.balancer"):
        tensors[name] = 0.5 + torch.rand(shape, generator=draw)
    tensors |= toy_thresholds(shape, (0.02, 0.1), draw) | toy_dictionaries(shape, 64, draw)
    tensors |= {name: toy_basis(shape, 4, draw) for name in BASES}
    # Similar atoms, as in trained dictionaries: coefficients of orthogonal pursuit then differ much from inner products.
    atoms = tensors["keys.dictionary"].float()
    atoms = atoms[:, :8].repeat_interleave(8, 1) + 0.4 * atoms
    tensors["keys.dictionary"] = torch.nn.functional.normalize(atoms, dim=-1).half()
    tensors |= toy_components(shape, draw)
    tensors |= toy_predictions(tensors, draw)
    return toy_artifact(toy_model(head_dim=GEOMETRY.head_dim), tensors=tensors)


def request(method, options, artifact=None, geometry=GEOMETRY, fp32_params=False):
    from calib.export.onnx.models import Request  # onnx, which only the extra `export` brings

    return Request(method, dict(options), artifact, "", geometry, seed=3, fp32_params=fp32_params)


class Graphs:
    """The ONNX models of a layer as functions of named arrays; each model's session is made once."""

    def __init__(self, asked, layer=LAYER):
        self.layer, self.models, self.sessions = asked.layer(layer), asked.models(layer), {}
        self.prefix = f"layer{layer}."

    def __call__(self, name, **given):
        return self.run(name, given)

    def run(self, name, given):
        import onnxruntime

        if name not in self.sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            data = self.models[self.prefix + name].SerializeToString()
            self.sessions[name] = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        session = self.sessions[name]
        return dict(zip((found.name for found in session.get_outputs()), session.run(None, given), strict=True))

    def streams(self):
        """Every packed stream, with the prefix of its graphs' names."""
        return [
            (f"{tier.name}{stream.role}.", stream)
            for tier in self.layer.tiers
            for stream in (tier.keys, tier.values)
            if stream.writer is not None
        ]


def measured(stream, tokens, query, fp32_params):
    """The stream's transform, measured by the runtime on these tokens, and its parameters by the graphs' names for them."""
    if not stream.measured:
        return stream.transform, {}
    transform = stream.transform.measure(tokens, query, torch.float32 if fp32_params else torch.float16)
    return transform, {name: getattr(transform, own).numpy() for name, own in owns(stream)}


def owns(stream):
    """Names of a measured transform's parameters, as pairs: in a graph, and in the runtime's stage."""
    return [
        (name, {"half": "scale"}.get(name, name) if len(stream.numbers()) == 1 else name) for name in stream.numbers()
    ]


def block_of(stream, transform, tokens, fp32_params):
    """The fields that the runtime stores for `tokens`, encoded block by block if blocks are segments, and concatenated."""
    size = getattr(stream.writer, "tokens", None) or tokens.shape[2]
    parts = [encoded(transform, stream.codec, part.contiguous(), fp32_params) for part in tokens.split(size, 2)]
    return {
        name: sum(part[name] for part in parts) if name == OVERFLOWED else torch.cat([part[name] for part in parts], 2)
        for name in parts[0]
    }


def predicted(stream, keys_stream, keys):
    """The runtime's prediction of values from the codes of `keys`, and the keys' fields as inputs of the values' graphs; 0 and no
    inputs if values are not predicted."""
    if stream.predicted is None:
        return 0.0, {}
    block = block_of(keys_stream, keys_stream.transform, keys, False)
    fields = {f"keys.{name}": part for name, part in arrays(block).items()}
    return stream.predicted.prediction.values(keys_stream.codec, block), fields


def arrays(block):
    return {name: part.numpy() for name, part in block.items()}


def decoded(stream, transform, block):
    """x^ decoded by the runtime, with the transform undone."""
    return transform.inverse(stream.codec.decode(block, stream.shape.channels))


def sizes(stream):
    """Numbers of tokens to encode: one and three groups; or, if tokens are encoded independently, 1, 19 to 21 and 33."""
    group = getattr(stream.writer, "tokens", None) or stream.codec.token_group()
    return (group, 3 * group) if group > 1 else (1, 19, 20, 21, 33)


def random_tokens(shape, seed, dtype=torch.float32):
    """Random float32 tokens, rounded to `dtype`, of order 1, with one channel ten times as large, as in keys."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 10
    return x.to(dtype).float()


def hard_tokens(shape):
    """Tokens by name that are hard to round: with few bits, all equal, or at the ends of float16's range."""
    signs = random_tokens(shape, 11).sign()
    return {
        "bfloat16": random_tokens(shape, 12, torch.bfloat16),
        "zeros": torch.zeros(shape),
        "constant": torch.full(shape, -1.375),
        "65504": 65504.0 * signs,
        "tiny": 2.0**-24 * random_tokens(shape, 13),
    }


def tie(ours, theirs, exact, size):
    """Where the exact number is half-way between two stored numbers that differ, to 1e-6 of `size`: a tie in rounding."""
    half_way = (np.asarray(ours, np.float64) + np.asarray(theirs, np.float64)) / 2
    return np.abs(exact - half_way) <= 1e-6 * size
