"""Wrong options of `gear`, its presets and `corrections`: each raises one line with the value, the range and a remedy."""

import pytest
from cases import calibrated_artifact
from one_line import refused
from toy_models import random_model

from calib.runtime import Artifact, compress
from calib.runtime.artifact.artifact import ArtifactError

pytestmark = pytest.mark.arithmetic

NAN = float("nan")
PRESETS = ("gear_l", "uniform", "group_wise", "outlier_reduced")
CALIBRATED = {"statistics": "calibrated"}
RANKS = (-1, 1.5, "4", True, NAN, [4], -0.1)
SHARES = (2, -0.1, NAN, "0.02", True, None, [0.02])
NO_RANK = "must be a whole number from 0, or a share (0.0 ... 1.0) of min(tokens, channels), got"


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def artifact(model):
    return calibrated_artifact(model)


def without(artifact: Artifact, part: str) -> Artifact:
    tensors = {name: tensor for name, tensor in artifact.tensors.items() if part not in name}
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


WRONG_OPTIONS = [
    *(
        (method, {name: rank}, [f"{name} {NO_RANK} {rank!r}"])
        for method in ("gear", *PRESETS)
        for name in ("rank", "decode_rank")
        for rank in RANKS
    ),
    *(
        (method, {"outliers": share}, [f"outliers must be a share from 0 to 1, got {share!r}", "0.02 is usual"])
        for method in ("gear", *PRESETS)
        for share in SHARES
    ),
    *(
        (method, {"block": block}, ["block must be a whole number of tokens, at least 1", repr(block)])
        for method in ("gear", "gear_l")
        for block in (0, -1, 1.5, "20", True)
    ),
    ("gear", {"backbone": "kivi", "block": 20}, ["group=64 must divide block=20"]),
    ("gear", {"backbone": "kivi", "block": 20, "group": 64}, ["group=64 must divide block=20", "keys share"]),
    ("gear", {"backbone": "kivi", "group": 48}, ["group=48 must divide block=64"]),
    ("gear", {"backbone": "kivi", "group": 24, "block": 48}, ["keys", "24 tokens", "divisor of 64"]),
    ("gear", {"backbone": "kivi", "group": 128, "block": 128}, ["keys", "128 tokens", "divisor of 64"]),
    ("gear", {"backbone": "kivi", "group": 32, "block": 32.0}, ["block", "32.0"]),
    *(("gear", {"group": size}, ["group", "at least 1", repr(size)]) for size in (0, -64, 1.5, "64", None, True)),
    *(("gear", {"per_head": word}, ["per_head must be True or False", repr(word)]) for word in (1, 0, "yes", None)),
    *(
        ("gear", {"variant": word}, ["variant must be one of released, paper", repr(word)])
        for word in ("relased", "", None, 3, ["paper"])
    ),
    *(
        ("gear", {"backbone": word}, ["backbone must be one of kcvt, kivi, channel, uniform", repr(word)])
        for word in ("kvct", "", 3, 0, ["kivi"])
    ),
    *(("gear", {"bits": bits}, ["bits", "1 ... 8", repr(bits)]) for bits in (0, 9, 2.5, "4", True)),
    *(
        (method, {"statistics": word}, ["statistics must be one of prompt, calibrated", repr(word)])
        for method in ("gear", "gear_l")
        for word in ("promt", None, 3)
    ),
    ("gear", {"rnk": 3}, ["'rnk'", "'gear'", "did you mean 'rank'?"]),
    ("gear", {"outlier": 0.1}, ["'outlier'", "did you mean 'outliers'?"]),
    ("gear_l", {"bock": 3}, ["'bock'", "'gear_l'", "did you mean 'block'?"]),
    ("uniform", {"recompress": 3}, ["'recompress'", "'uniform'", "known: variant, backbone, bits"]),
    ("gear", {"clip": 0.5}, ["'clip'", "'gear'", "known: variant"]),
    *(
        (method, asked, [f"{name} of values", repr(wrong)])
        for name, wrong in (("bits", 9), ("outliers", 2), ("rank", -1), ("decode_rank", 1.5), ("group", 0))
        for method, asked in (
            ("gear", {name: {"keys": 1, "values": wrong}}),
            *([("rtn", {"corrections": {name: {"keys": 1, "values": wrong}}})] if "rank" in name else []),
        )
    ),
    *(
        (method, {name: {"keys": 1}}, [f"{name} must be one setting", "got {'keys': 1}; name both"])
        for method in ("gear", *PRESETS)
        for name in ("bits", "outliers", "rank", "decode_rank", "group")
    ),
    ("gear", {"backbone": "kivi", "group": {"keys": 48, "values": 64}}, ["group=48 must divide block=64"]),
    (
        "rtn",
        {"corrections": {"residual_bits": {"keys": 2, "values": 0}, "residual_group": {"keys": 32, "values": 16}}},
        ["residual_group={'keys': 32, 'values': 16} without residual_bits"],
    ),
    ("rtn", {"corrections": {"residual_bits": {"keys": 2, "values": 9}}}, ["residual_bits of values", "got 9"]),
    *((method, CALIBRATED, ["statistics='calibrated'", "needs an artifact", "Artifact.load"]) for method in ("gear", *PRESETS)),
    *(
        (method, {"corrections": {"rank": 1}}, [f"method '{method}' has options of its own", "corrections"])
        for method in ("gear", *PRESETS)
    ),
    *(
        ("zipcache", {"corrections": asked}, ["corrections must be a mapping such as {outliers: 0.02, rank: 4}", repr(asked)])
        for asked in ([], [("rank", 2)], "rank", 3, True)
    ),
    *(
        (method, {"corrections": {name: rank}}, [f"{name} {NO_RANK} {rank!r}"])
        for method in ("zipcache", "kivi")
        for name in ("rank", "decode_rank")
        for rank in RANKS
    ),
    *(
        ("mikv", {"corrections": {"outliers": share}}, ["outliers must be a share from 0 to 1", repr(share)])
        for share in SHARES
    ),
    *(
        ("rtn", {"corrections": {"statistics": word}}, ["statistics must be one of prompt, calibrated", repr(word)])
        for word in ("promt", None, 3)
    ),
    ("zipcache", {"corrections": {"rnk": 2}}, ["'rnk'", "corrections", "did you mean 'rank'?"]),
    ("zipcache", {"corrections": {"block": 2}}, ["'block'", "corrections", "known: outliers, rank"]),
    ("zipcache", {"corrections": {1: 2}}, ["1", "corrections", "known: outliers, rank"]),
    ("zipcache", {"corection": {"rank": 2}}, ["'corection'", "did you mean 'corrections'?"]),
    ("zipcache", {"corrections": CALIBRATED}, ["corrections", "statistics='calibrated'", "artifact", "Artifact.load"]),
    *(
        (method, {"corrections": {"rank": rank}}, ["whole segment", "statistics='calibrated'", "gear, zipcache"])
        for method in ("mikv", "kivi", "rtn")
        for rank in (2, 0.1)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options", "parts"), WRONG_OPTIONS, ids=lambda part: str(part)[:50])
def test_wrong_options(model, method, options, parts):
    text = refused(model, method, options)
    assert all(part in text for part in parts), text


RATHER = ["thresholds for tokens as the model makes them", "give the method statistics='calibrated' as well"]
WRONG_FOR_AN_ARTIFACT = [
    ("gear", {"outliers": 0.03, **CALIBRATED}, ["outliers=0.03", "0.02, 0.05, 0.1", "use one of these, or fit again"]),
    ("gear_l", {"outliers": 0.03, **CALIBRATED}, ["outliers=0.03", "0.02, 0.05, 0.1"]),
    *(
        ("gear", {name: rank, **CALIBRATED}, ["rank must be a whole number from 1 to the 8 vectors", f"got {rank}"])
        for name in ("rank", "decode_rank")
        for rank in (9, 0.1)
    ),
    (
        "gear",
        {"variant": "paper", "rank": 0.02, **CALIBRATED},
        ["rank", "8 vectors of the artifact's basis", "got 0.02"],
    ),
    ("zipcache", {"corrections": {"outliers": 0.02, **CALIBRATED}}, RATHER),
    ("mikv", {"corrections": {"outliers": 0.02, **CALIBRATED}}, RATHER),
    ("kivi", {"corrections": {"outliers": 0.03, **CALIBRATED}}, ["outliers=0.03", "0.02, 0.05, 0.1"]),
    ("rtn", {"corrections": {"rank": 9, **CALIBRATED}}, ["rank", "8 vectors", "got 9"]),
]


@pytest.mark.parametrize(("method", "options", "parts"), WRONG_FOR_AN_ARTIFACT, ids=lambda part: str(part)[:50])
def test_what_an_artifact_cannot_give(model, artifact, method, options, parts):
    text = refused(model, method, options, artifact)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("method", "options", "missing", "parts"),
    [
        ("gear", CALIBRATED, ".outliers.", ["'keys.outliers.channel.low'", "'outlier_thresholds' of `calib fit`"]),
        ("gear", {"variant": "paper", "rank": 4, **CALIBRATED}, ".outliers.", ["'keys.outliers.layer.low'"]),
        ("gear", CALIBRATED, ".residual.", ["'keys.residual.*x1.4'", "'residual_basis' of `calib fit`"]),
        ("gear", {"bits": 3, **CALIBRATED}, "nothing", ["'keys.residual.*x1.3'", "'residual_basis' of `calib fit`"]),
        ("gear", {"backbone": "kivi", "group": 32, **CALIBRATED}, "nothing", ["'keys.residual.32x1.2'"]),
        ("kivi", {"corrections": {"rank": 2, **CALIBRATED}}, "nothing", ["'keys.residual.32x1.2'"]),
        ("zipcache", {**CALIBRATED, "corrections": {"rank": 2, **CALIBRATED}}, "nothing", ["'keys.residual.fixed.4'"]),
    ],
)  # fmt: skip
def test_what_an_artifact_does_not_hold(model, artifact, method, options, missing, parts):
    """The message names the missing tensor, the setting of `calib fit` that measures it, and the tensors that the artifact has."""
    with pytest.raises(ArtifactError, match=r"\S") as error:
        compress(model, method, without(artifact, missing), **options)
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in [*parts, "it holds keys.balancer"]), text


def test_what_is_not_used_is_not_asked_for(model, artifact):
    """Only tensors that are used are required: thresholds if the rank is 0, the basis without outliers, and none with statistics of
    the prompt."""
    for missing, options in (
        (".residual.", {"rank": 0, "decode_rank": 0, **CALIBRATED}),
        (".outliers.", {"outliers": 0.0, **CALIBRATED}),
        (".", {}),
    ):
        compress(model, "gear", without(artifact, missing), **options).release()
    compress(model, "zipcache", None, corrections={}).release()
