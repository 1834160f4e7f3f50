"""Encode and decode graphs in onnxruntime give the runtime's codes and tokens. Fields are compared bit for bit; where they differ,
the exact number in float64 must be halfway between two values (a tie), and few may differ."""

from dataclasses import replace

import pytest

pytest.importorskip("onnxruntime", reason="the extra `export` (onnxruntime) is not installed")

import numpy as np
import torch
from onnx.reference import ReferenceEvaluator
from onnx_graphs import (
    GEOMETRY,
    Graphs,
    arrays,
    block_of,
    decoded,
    hard_tokens,
    measured,
    predicted,
    random_tokens,
    request,
    sizes,
    small_artifact,
    tie,
)

from calib.kernels.pack.reference import unpack, unpack_bytes
from calib.runtime.methods import Geometry
from calib.runtime.stages.codec import Sparse
from calib.runtime.stages.transform import MeasuredBalancer

pytestmark = pytest.mark.arithmetic

HEADS, CHANNELS = GEOMETRY.kv_heads, GEOMETRY.head_dim
ODD = Geometry(1, 3, 10)  # words and bytes that are partly filled
WIDE = Geometry(1, 4, 64)  # 256 channels in all: the form of the power iteration depends on the number of tokens

# Tolerance of decoded values, relative to the largest: a product and a sum, or a few products, in float32.
VALUES = 1e-5
# Tolerance of factors from a power iteration, relative to the largest: float16 has 11 bits, and sums are in another order.
FACTORS = 2.0**-9

CALIBRATED = {"statistics": "calibrated"}
UNIFORM = {
    "kivi": ("kivi", {}, GEOMETRY),
    "kivi calibrated, 3 bits": ("kivi", {"bits": 3, **CALIBRATED}, GEOMETRY),
    "kivi, 1 bit": ("kivi", {"bits": 1, "clip": 0.5, "group": 8, "residual": 16}, GEOMETRY),
    "rtn": ("rtn", {}, GEOMETRY),
    "rtn, 3 bits, 10 channels": ("rtn", {"bits": 3}, ODD),
    "rtn calibrated": ("rtn", CALIBRATED, GEOMETRY),
    "zipcache": ("zipcache", {}, GEOMETRY),
    "zipcache calibrated": ("zipcache", CALIBRATED, GEOMETRY),
    "zipcache frozen": ("zipcache", {"refresh": False}, GEOMETRY),
    "zipcache of a layer": ("zipcache", {"scope": "layer", "salient_set": "layer", "value_scale": "tier"}, GEOMETRY),
    "mikv": ("mikv", {}, GEOMETRY),
    "mikv calibrated": ("mikv", {"important": 8, **CALIBRATED}, GEOMETRY),
    "uniform": ("uniform", {}, GEOMETRY),
    "group_wise": ("group_wise", {"bits": 5}, GEOMETRY),
}
SPARSE = {
    "csr": {},
    "csr fp8 int16": {"sparsity": 4, "coefficients": "fp8", "index": "int16"},
    "csr key chunks": {"sparsity": 8, "key_chunks": 2},
    "csr orthogonal": {"sparsity": 8, "coefficients": 4, "pursuit": "orthogonal"},
}
CORRECTED = {
    "gear": ("gear", {}, GEOMETRY),
    "gear in blocks of one": ("gear", {"block": 1}, GEOMETRY),  # no outlier per channel: a field of width 0
    "gear calibrated": ("gear", CALIBRATED, GEOMETRY),
    "gear paper": ("gear", {"variant": "paper"}, WIDE),
    "gear paper calibrated": ("gear", {"variant": "paper", **CALIBRATED}, GEOMETRY),
    "gear on kivi": ("gear", {"backbone": "kivi", "group": 16, "block": 32, "per_head": True}, GEOMETRY),
    "outlier_reduced": ("outlier_reduced", {}, GEOMETRY),
    "residual": ("rtn", {"bits": 2, "corrections": {"outliers": 0.1, "residual_bits": 1}}, GEOMETRY),
    "zipcache corrected": ("zipcache", {"corrections": {"outliers": 0.05, "rank": 2}}, GEOMETRY),
    "residual of csr": ("csr", {"sparsity": 4, "corrections": {"residual_bits": 2}}, GEOMETRY),
}


PLAIN = {"size": False, "predict": False}
COMPONENTS = {
    "components": PLAIN,
    "components after RoPE": {"rope": "after"},
    "sizes": {"size": True, "predict": False},
    "sizes and predictions": {"size": True, "predict": True, "trellis": False},
    "a trellis": {**PLAIN, "trellis": True},
    "a trellis, 5 bits": {**PLAIN, "trellis": True, "bits": 5},
    "all three": {"size": True, "predict": True, "trellis": True},
    "all three in tiers": {"size": True, "predict": True, "trellis": True, "tiers": [[4, 0.3], [1.5, 0.7]]},
}


@pytest.fixture(scope="module")
def artifact():
    return small_artifact()


def graphs(artifact, method, options, geometry, fp32_params=False):
    layer = 1 if geometry is GEOMETRY else 0
    return Graphs(request(method, options, artifact if geometry is GEOMETRY else None, geometry, fp32_params), layer)


def both(found, name, stream, tokens, fp32_params=False):
    """Fields encoded by the graph and by the runtime, tokens decoded from the runtime's fields by both, and the transform."""
    query = random_tokens((tokens.shape[0], 2 * tokens.shape[1], 3, tokens.shape[3]), 7)
    transform, numbers = measured(stream, tokens, query, fp32_params)
    if stream.measured:
        given = {stream.role: tokens.numpy()} | ({"query": query.numpy()} if "balance" in numbers else {})
        own = found(f"{name}measure", **given)
        for part, number in numbers.items():
            assert (own[part].shape, own[part].dtype) == (number.shape, number.dtype)
            different = own[part] != number
            if different.any():
                exact = measured_exactly(stream, tokens, query)
                assert tie(own[part], number, exact, exact)[different].all()
    theirs = block_of(stream, transform, tokens, fp32_params)
    scales = {name: theirs["scales"].numpy() for name in stream.scales()}
    if scales:
        assert_scales(found, name, stream, tokens, scales["chunk_scales"])
    ours = found(f"{name}encode", **{stream.role: tokens.numpy()}, **numbers, **scales)
    assert {key: (part.shape, part.dtype) for key, part in ours.items()} == {
        key: (part.shape, part.dtype) for key, part in arrays(theirs).items()
    }
    packed = {key: part for key, part in arrays(theirs).items() if key in stream.writer.fields()}
    x = found(f"{name}decode", **packed, **numbers)[stream.role]
    return ours, arrays(theirs), x, decoded(stream, transform, theirs).numpy(), transform


def assert_scales(found, name, stream, tokens, expected):
    """Assert that the graph measures the channel scales of every block as the runtime does, except for ties."""
    blocks = [found(f"{name}measure", **{stream.role: part.numpy()}) for part in tokens.split(stream.writer.tokens, 2)]
    own = np.concatenate([block["chunk_scales"] for block in blocks], 2)
    different = own != expected
    assert own.dtype == expected.dtype and tie(own, expected, exact_scales(stream, tokens), expected)[different].all()


def exact_scales(stream, tokens):
    """Channel scales sqrt(max |x|) of every block, in float64."""
    blocks = tokens.double().unflatten(2, (-1, stream.writer.tokens))
    return blocks.abs().amax(3).sqrt().numpy()


def measured_exactly(stream, tokens, query):
    """Channel scales or balancer in float64: the square root, before it is rounded to float16."""
    largest = tokens.double().abs().amax(2, keepdim=True)
    if not isinstance(stream.transform, MeasuredBalancer):
        return largest.sqrt().numpy()
    by_head = query.double().abs().amax(2, keepdim=True).unflatten(1, (tokens.shape[1], -1)).amax(2)
    return (by_head / largest).sqrt().numpy()


def assert_values(x, expected, tolerance=VALUES):
    np.testing.assert_allclose(x, expected, rtol=0, atol=tolerance * np.abs(expected).max(initial=1e-30))


def odd_codes(stream, ours, theirs, y):
    """Number of codes that differ; each must be halfway between two levels of the stored parameters, in float64. None if channel
    scales differ, which must be ties, since all codes depend on them."""
    codec = getattr(stream.codec, "uniform", stream.codec)
    if codec is not stream.codec:  # values over the scales of their block's channels
        scales = torch.from_numpy(theirs["scales"]).repeat_interleave(stream.writer.tokens, 2)
        unequal = ours["scales"] != theirs["scales"]
        if unequal.any():
            assert tie(ours["scales"], theirs["scales"], exact_scales(stream, y), theirs["scales"])[unequal].all()
            return None
        y = y / torch.where(scales > 0, scales, 1)
    codes = [
        unpack(torch.from_numpy(block["words"]), codec.bits, y.shape[-1]).double().numpy() for block in (ours, theirs)
    ]
    different = codes[0] != codes[1]
    if not different.any():
        return 0
    if codec.group is None:
        scale, zero = (part.double().numpy() for part in codec.fixed(torch.zeros(1)))
    else:
        np.testing.assert_array_equal(ours["parameters"], theirs["parameters"])
        blocks, columns = theirs["parameters"].shape[2:]
        parameters = torch.from_numpy(theirs["parameters"]).double().repeat_interleave(y.shape[2] // blocks, 2)
        scale, zero = (
            part.repeat_interleave(y.shape[3] // (columns // 2), 3).numpy() for part in parameters.chunk(2, -1)
        )
    level = (y.double().numpy() - zero) / scale
    assert tie(*codes, level, 1.0)[different].all()
    return int(different.sum())


@pytest.mark.parametrize("case", UNIFORM)
def test_uniform_codes_are_the_runtime_s(case, artifact):
    method, options, geometry = UNIFORM[case]
    found, odd, all_codes = graphs(artifact, method, options, geometry), 0, 0
    for name, stream in found.streams():
        for number, count in enumerate(sizes(stream)):
            shape = (1 + 2 * (number % 2), geometry.kv_heads, count, geometry.head_dim)
            kinds = {"random": random_tokens(shape, number)} | (hard_tokens(shape) if number == 1 else {})
            for kind, tokens in kinds.items():
                fp32_params = stream.codec.fp32_params(tokens)
                if fp32_params:  # 65504 at one bit: another request, tested below
                    assert kind == "65504" and stream.codec.bits == 1
                    continue
                ours, theirs, x, expected, transform = both(found, name, stream, tokens)
                assert_values(x, expected)
                different = odd_codes(stream, ours, theirs, transform.forward(tokens))
                if different is None:
                    continue
                odd += different
                all_codes += tokens.numel()
                if "parameters" in theirs:
                    np.testing.assert_array_equal(ours["parameters"], theirs["parameters"])
    assert odd <= 1e-5 * all_codes


@pytest.mark.parametrize("case", COMPONENTS)
def test_codes_of_components_are_the_runtime_s(case, artifact):
    """Bit for bit: sums of integers do not depend on their order, and the trellis search has the same operations."""
    found = graphs(artifact, "klt", COMPONENTS[case], GEOMETRY)
    for tier in found.layer.tiers:
        for number, count in enumerate((1, 19, 33)):
            shape = (1 + 2 * (number % 2), HEADS, count, CHANNELS)
            kinds = {"random": random_tokens(shape, number)} | (hard_tokens(shape) if number == 1 else {})
            for keys in kinds.values():
                values = keys.flip(2) + 0.1 * random_tokens(shape, 5)
                for stream, tokens in ((tier.keys, keys), (tier.values, values)):
                    told, fields = predicted(stream, tier.keys, keys)
                    name, transform = f"{tier.name}{stream.role}.", stream.transform
                    theirs = block_of(stream, transform, tokens - told, False)
                    ours = found.run(f"{name}encode", {stream.role: tokens.numpy(), **fields})
                    assert ours.keys() == theirs.keys()
                    for field, expected in arrays(theirs).items():
                        np.testing.assert_array_equal(ours[field], expected, err_msg=f"{case} {name}{field}")
                        assert ours[field].dtype == expected.dtype
                    x = found.run(f"{name}decode", {**arrays(theirs), **fields})[stream.role]
                    assert_values(x, (decoded(stream, transform, theirs) + told).numpy())


def test_wide_parameters_are_the_runtime_s(artifact):
    found = graphs(artifact, "rtn", {"bits": 1}, GEOMETRY, fp32_params=True)
    tokens = 1e30 * random_tokens((2, HEADS, 5, CHANNELS), 0)
    tokens[1] *= 1e-30
    for name, stream in found.streams():
        ours, theirs, x, expected, _ = both(found, name, stream, tokens, fp32_params=True)
        assert theirs["parameters"].dtype == np.float32
        assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
        assert_values(x, expected)


@pytest.mark.parametrize("case", SPARSE)
def test_pairs_are_the_runtime_s(case, artifact):
    if "key_chunks" in SPARSE[case]:  # atoms of half a key, as values have them
        narrow = {f"keys.{kind}": artifact.tensors[f"values.{kind}"] for kind in ("dictionary", "layer_groups")}
        artifact = replace(artifact, tensors={**artifact.tensors, **narrow})
    found, odd, vectors = graphs(artifact, "csr", SPARSE[case], GEOMETRY), 0, 0
    for name, stream in found.streams():
        for number, count in enumerate((1, 15, 16, 33)):
            shape = (1 + 2 * (number % 2), HEADS, count, CHANNELS)
            kinds = {"random": random_tokens(shape, number)} | (hard_tokens(shape) if number == 1 else {})
            for tokens in kinds.values():
                ours, theirs, x, expected, _ = both(found, name, stream, tokens)
                assert_values(x, expected)
                different, every = odd_pairs(stream.codec, ours, theirs, tokens)
                odd, vectors = odd + different, vectors + every
    assert odd <= 0.005 * vectors, (odd, vectors)


def odd_pairs(codec: Sparse, ours, theirs, tokens):
    """Number of vectors whose pairs differ, and of all; each difference must be a tie in float64, of two atoms or in the rounding
    of a coefficient."""
    index, kept = [], []
    for block in (ours, theirs):
        block = {name: torch.from_numpy(part) for name, part in block.items()}
        numbers = block["indices"].int() & 0xFFFF
        if codec.index == "packed":
            numbers = unpack_bytes(block["indices"], (codec.atoms - 1).bit_length(), codec.pairs)
        index.append(numbers.reshape(-1, codec.sparsity).numpy())
        kept.append(codec.coefficients.decode(block, codec.pairs).reshape(-1, codec.sparsity).double().numpy())
    vectors = tokens.reshape(-1, tokens.shape[-1] // codec.chunks).double()
    norm = vectors.norm(dim=-1, keepdim=True).numpy()
    other = (index[0] != index[1]).any(-1)
    rounded = (kept[0] != kept[1]).any(-1) & ~other
    gap, exact = pursuit(codec, vectors, index[1])
    assert (gap[other] <= 1e-6).all()
    if isinstance(codec.coefficients.form, int):  # a tie of a token's scale changes all its coefficients
        assert_values(kept[0][rounded], kept[1][rounded], 2e-3)
    else:
        equal = kept[0] == kept[1]
        assert (equal | tie(*kept, exact, norm))[rounded].all()
    return int(other.sum() + rounded.sum()), len(vectors)


def pursuit(codec: Sparse, vectors, chosen):
    """A float64 pursuit along the atoms `chosen [V, s]`: the smallest difference of the two largest correlations, relative to the
    vector's norm, and the coefficients `[V, s]`."""
    atoms, every = codec.offline.tensor.double(), torch.arange(len(vectors))
    residual, gap, parts = vectors.clone(), torch.full((len(vectors),), torch.inf, dtype=torch.float64), []
    norm = vectors.norm(dim=-1).clamp(min=1e-300)
    for step in range(codec.sparsity):
        sizes_of = (residual @ atoms.T).abs()
        best = sizes_of.topk(2, -1).values
        gap = torch.minimum(gap, (best[:, 0] - best[:, 1]) / norm)
        taken = atoms[torch.from_numpy(chosen[:, : step + 1]).long()]  # [V, k, d]
        if codec.orthogonal:
            parts = torch.linalg.lstsq(taken.mT, vectors[..., None]).solution[..., 0]
            residual = vectors - (parts[:, None] @ taken)[:, 0]
        else:
            parts.append((residual * taken[:, -1]).sum(-1))
            residual = residual - taken[:, -1] * parts[-1][every, None]
    return gap.numpy(), (parts if codec.orthogonal else torch.stack(parts, -1)).numpy()


@pytest.mark.parametrize("case", CORRECTED)
def test_corrections_are_the_runtime_s(case, artifact):
    method, options, geometry = CORRECTED[case]
    found = graphs(artifact, method, options, geometry)
    for name, stream in found.streams():
        counts = sizes(stream) if len(sizes(stream)) == 2 else (1, 20, 21, 300)
        for number, count in enumerate(counts):
            tokens = random_tokens((1 + 2 * (number % 2), geometry.kv_heads, count, geometry.head_dim), number)
            ours, theirs, x, expected, _ = both(found, name, stream, tokens)
            assert_values(x, expected)
            iterated = stream.codec.low_rank is not None and stream.codec.low_rank.basis is None
            for key in theirs:
                if "low_rank" in key:
                    assert_values(ours[key], theirs[key], FACTORS if iterated else 2.0**-10)
            if "outliers.delta" in theirs:
                assert_outliers(ours, theirs, iterated or stream.codec.low_rank is not None)
            for key in (
                "words",
                "parameters",
                "indices",
                "residual.words",
                "residual.parameters",
                "outliers.overflowed",
            ):
                if key in theirs:
                    np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)


def assert_outliers(ours, theirs, near):
    """Assert that both have the same outliers, in any order, with equal deltas (within 2^-10 with `near`, if low-rank factors,
    which round differently, are part of them). Entries at one position are an outlier and unused ones."""
    names = [name for name in ("outliers.tokens", "outliers.channels") if name in theirs]
    sorted_entries = []
    for block in (ours, theirs):
        positions = [block[name].astype(np.int64) for name in names]
        if names == ["outliers.tokens"]:  # lists per channel, channels changing fastest
            channels = np.broadcast_to(np.arange(positions[0].shape[-1]) % CHANNELS, positions[0].shape)
            positions.append(channels)
        order = np.lexsort((abs(block["outliers.delta"]), *positions), -1)
        sorted_entries.append([np.take_along_axis(part, order, -1) for part in (*positions, block["outliers.delta"])])
    for one, other in zip(*(entries[:-1] for entries in sorted_entries), strict=True):
        np.testing.assert_array_equal(one, other)
    assert_values(sorted_entries[0][-1], sorted_entries[1][-1], 2.0**-10 if near else 0.0)


@pytest.mark.parametrize("case", ["gear", "gear paper", "outlier_reduced", "residual"])
def test_corrections_of_ties_are_as_good_as_the_runtime_s(case, artifact):
    """Which of equal entries become outliers may differ; the error of the decoded tokens must not be larger than the runtime's."""
    narrow, wider = (graphs(artifact, *CORRECTED[case], fp32_params) for fp32_params in (False, True))
    for (name, one), (_, other) in zip(narrow.streams(), wider.streams(), strict=True):
        shape = (1, one.shape.heads, sizes(one)[-1], one.shape.channels)
        for kind, tokens in hard_tokens(shape).items():
            fp32_params = one.codec.fp32_params(tokens)
            assert fp32_params == (kind == "65504")
            found, stream = (wider, other) if fp32_params else (narrow, one)
            ours, _, _, expected, _ = both(found, name, stream, tokens, fp32_params)
            packed = {key: part for key, part in ours.items() if key in stream.writer.fields()}
            x = found(f"{name}decode", **packed)[stream.role]
            errors = [np.square(tokens.numpy().astype(np.float64) - kept).sum() for kept in (x, expected)]
            assert errors[0] <= 1.05 * errors[1] + 1e-9 * np.square(tokens.numpy()).sum(), kind


@pytest.mark.parametrize("case", ["kivi", "rtn, 3 bits, 10 channels", "zipcache calibrated"])
def test_onnx_s_own_evaluator_gives_the_same(case, artifact):
    """ONNX's reference evaluator gives the same fields, so they do not depend on one runtime's operators."""
    method, options, geometry = UNIFORM[case]
    found = graphs(artifact, method, options, geometry)
    for name, stream in found.streams():
        given = {
            stream.role: random_tokens((2, stream.shape.heads, sizes(stream)[-1], stream.shape.channels), 1).numpy()
        }
        evaluator = ReferenceEvaluator(found.models[f"{found.prefix}{name}encode"])
        theirs = dict(zip(evaluator.output_names, evaluator.run(None, given), strict=True))
        ours = found.run(f"{name}encode", given)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(part, theirs[key]) for key, part in ours.items())
