"""Wrong options of the method `csr`, and artifacts that do not fit them: each raises one line with the value, the range and a
remedy."""

import pytest
import torch
from csr.scenarios import dictionaries
from one_line import message, refused
from toy_models import random_model
from unrotatable import UNROTATABLE

from calib.runtime import Artifact, compress
from calib.runtime.artifact.artifact import ArtifactError

pytestmark = pytest.mark.arithmetic

NAN = float("nan")
TIERS = [[16, 0.2], [4, 0.8]]
ATOMS = 128  # atoms of the artifact's dictionaries, 64 for each of 2 KV heads


@pytest.fixture(scope="module")
def model():
    return random_model("llama")  # head_dim 32


@pytest.fixture(scope="module")
def artifact(model):
    return dictionaries(model, ATOMS // 2, value_chunks=2)


def changed(artifact: Artifact, **tensors: torch.Tensor | None) -> Artifact:
    """The artifact with other tensors (`keys_dictionary=...`), and without those that are None."""
    named = {name.replace("_", ".", 1): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in (artifact.tensors | named).items() if tensor is not None}
    return Artifact(kept, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def atoms(groups: int, count: int, width: int) -> torch.Tensor:
    """Random unit rows."""
    rows = torch.randn(groups, count, width, generator=torch.Generator().manual_seed(0))
    return (rows / rows.norm(dim=-1, keepdim=True)).half()


NO_FORMAT = "coefficients must be 'fp16', 'fp8' or a whole number of bits 2 ... 8, got"
WRONG_OPTIONS = [
    ({"sparsity": 8, "tiers": [[16, 0.2], [4, 0.8]]}, ["sparsity=8 with tiers", "leave it out"]),
    ({"corrections": {"residual_group": 8}}, ["residual_group=8 without residual_bits", "leave it out"]),
    ({"corrections": {"residual_bits": 9}}, ["residual_bits must be a whole number 0 ... 8, got 9"]),
    ({"corrections": {"outliers": 0.02, "statistics": "calibrated"}}, ["statistics='calibrated'"]),
    *(
        ({"sparsity": wrong}, ["sparsity must be a whole number from 1", repr(wrong), "8 is usual"])
        for wrong in (0, -1, 2.5, "8", True, [8], NAN)
    ),
    *(
        ({"sparsity": wrong}, ["sparsity must be one setting for both streams or {keys: ..., values: ...}", "name both"])
        for wrong in ({"keys": 8}, {"keys": 8, "values": 4, "other": 2}, {}, {"60 lines": 8, "20 lines": 4})
    ),
    ({"sparsity": {"keys": 8, "values": 0}}, ["sparsity of values must be a whole number from 1", "got 0", "8 is usual"]),
    ({"sparsity": {"keys": 40, "values": 4}}, ["sparsity", "40", "32 channels", "at most 32"]),
    ({"sparsity": {"keys": 3, "values": 5}}, ["sparsity=5", "2 chunks of a value", "multiple of 2"]),
    *(({"sparsity": wrong}, ["sparsity", str(wrong), "32 channels", "at most 32"]) for wrong in (34, 64, 10**9)),
    *(({"sparsity": wrong}, [f"sparsity={wrong}", "2 chunks", "multiple of 2"]) for wrong in (1, 7)),
    ({"sparsity": 6, "value_chunks": 4}, ["sparsity=6", "4 chunks", "multiple of 4"]),
    *(
        ({"value_chunks": wrong}, ["value_chunks must be a whole number from 1", repr(wrong), "2 is usual"])
        for wrong in (0, -1, 1.5, "2", True, [2])
    ),
    *(({"sparsity": wrong, "key_chunks": 4, "value_chunks": 1}, [f"sparsity={wrong}", "4 chunks of a key", "multiple of 4"])
      for wrong in (1, 6)),
    *(
        ({"key_chunks": wrong}, ["key_chunks must be a whole number from 1", repr(wrong), "1 is usual"])
        for wrong in (0, -1, 1.5, "2", True, [2])
    ),
    *(({"key_chunks": wrong}, [f"key_chunks={wrong}", "divide 32 channels"]) for wrong in (3, 5, 64)),
    *(
        ({"reverse_share": wrong}, ["reverse_share must be a number from 0", "to 1", repr(wrong), "0.5 is usual"])
        for wrong in (-0.1, 1.5, NAN, "0.5", None, True, [0.5])
    ),
    # With any sparsity: another sparsity would be no remedy.
    *(({"value_chunks": wrong}, [f"value_chunks={wrong}", "divide 32 channels"]) for wrong in (3, 5, 64)),
    *(
        ({"value_chunks": wrong, "sparsity": 3 * wrong}, [f"value_chunks={wrong}", "divide 32 channels"])
        for wrong in (3, 5)
    ),
    *(
        ({"online": wrong}, ["online must be a whole number from 0 or 'offline'", repr(wrong)])
        for wrong in (-1, 1.5, "3", True, [3], "online")
    ),
    *(({"coefficients": wrong}, [f"{NO_FORMAT} {wrong!r}"]) for wrong in (1, 9, 0, 16, -4, 2.0, True, "4")),
    *(({"coefficients": wrong}, [f"{NO_FORMAT} {wrong!r}"]) for wrong in ("fp32", "int8", "", None, [4], ["fp16"])),
    *(
        ({"index": wrong}, ["index must be one of packed, int16", repr(wrong)])
        for wrong in ("int8", "", None, 16, ["packed"])
    ),
    *(
        ({"pursuit": wrong}, ["pursuit must be one of matching, orthogonal", repr(wrong)])
        for wrong in ("omp", "", None, 1, ["matching"])
    ),
    *(({"window": wrong}, ["window must be a whole number from 0", repr(wrong)]) for wrong in (-1, 1.5, "64", True)),
    *(({"block": wrong}, ["block must be a whole number from 1", repr(wrong)]) for wrong in (0, -1, 1.5, "16", True)),
    *(({"tiers": TIERS, "window": wrong}, [f"window={wrong}", "tiers", "leave it out"]) for wrong in (1, 64)),
    ({"tiers": TIERS, "window": -1}, ["window", "-1"]),
    ({"tiers": TIERS, "block": 0}, ["block must be a whole number from 1", "0"]),
    *(
        ({"tiers": wrong}, ["tiers must be pairs (sparsity, share)", "best first", repr(wrong)])
        for wrong in ([], 5, "16,4", [16, 4], [[16]], [[16, 0.2, 1], [4, 0.8]], {16: 0.2, 4: 0.8})
    ),
    ({"tiers": [[4, 0.2], [16, 0.8]]}, ["tiers", "[4, 16]", "most precise first"]),
    ({"tiers": [[8, 0.5], [8, 0.5]]}, ["tiers", "[8, 8]"]),
    ({"tiers": [[{"keys": 8, "values": 8}, 0.5], [8, 0.5]]}, ["tiers", "most precise first"]),
    ({"tiers": [[{"keys": 8, "values": 4}, 0.5], [{"keys": 4, "values": 8}, 0.5]]}, ["tiers", "most precise first"]),
    ({"tiers": [[{"keys": 8}, 0.5], [4, 0.5]]}, ["tiers: sparsity must be one setting for both streams", "name both"]),
    ({"tiers": [[16, 0.2], [4, 0.7]]}, ["add up to 1", "[0.2, 0.7]", "0.9", "last tier"]),
    ({"tiers": [[16, NAN], [4, 0.7]]}, ["0 to 1", "nan"]),
    ({"tiers": [[16, 0.2], [5, 0.8]]}, ["5", "2 chunks", "multiple of 2"]),
    ({"tiers": [[34, 0.2], [4, 0.8]]}, ["34", "at most 32"]),
    *(
        ({"tiers": [[16, 0.2], [wrong, 0.8]]}, ["sparsity must be a whole number from 1", repr(wrong)])
        for wrong in (0, -4, 4.0, "4", None, True)
    ),
    *(
        ({"tiers": TIERS, "probes": wrong}, ["probes must be one of random+recent, random, recent, all", repr(wrong)])
        for wrong in ("promt", "", None, 3, ["all"], "special")  # there is no option for a special probe's ids
    ),
    *(
        ({"tiers": TIERS, "probe_share": wrong}, ["probe_share", "(0, 1]", repr(wrong)])
        for wrong in (0, -0.1, 1.5, NAN, "0.1", None, True)
    ),
    *(
        ({"corrections": {"residual_bits": wrong}}, ["residual_bits must be a whole number 0 ... 8", repr(wrong)])
        for wrong in (9, 16, -1, 2.5, "2", True)
    ),
    *(
        ({"corrections": {"residual_bits": 2, "residual_group": wrong}}, ["residual_group", "at least 1", repr(wrong)])
        for wrong in (0, -8, 1.5, "8", True)
    ),
    *(
        ({"corrections": {"residual_bits": 2, "residual_group": wrong}}, [f"group of {wrong}", "divide 32", "divisor"])
        for wrong in (5, 64)
    ),
    ({"corrections": {"outliers": 2}}, ["outliers must be a share from 0 to 1, got 2"]),
    *(({"corrections": {"rank": rank}}, ["rank", "one by one", "gear, zipcache"]) for rank in (2, 0.1)),
    ({"corrections": {"residual_bit": 2}}, ["'residual_bit'", "did you mean 'residual_bits'?"]),
    ({"sparsty": 3}, ["'sparsty'", "'csr'", "did you mean 'sparsity'?"]),
    ({"atoms": 3}, ["'atoms'", "'csr'", "known: sparsity"]),
    ({"statistics": "prompt"}, ["'statistics'", "'csr'", "known: sparsity"]),
]  # fmt: skip


@pytest.mark.parametrize("own", [False, True], ids=["artifact", "online"])
@pytest.mark.parametrize(("options", "parts"), WRONG_OPTIONS, ids=lambda part: str(part)[:60])
def test_wrong_options(model, artifact, options, parts, own):
    text = refused(model, "csr", options, None if own else artifact)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("index", ["packed", "int16"])
def test_more_atoms_than_an_index_can_name(model, artifact, index):
    """65,536 atoms, those of the artifact included, are accepted; one more is refused."""
    for chosen, online in ((artifact, 2**16 - ATOMS), (None, 2**16)):
        compress(model, "csr", chosen, online=online, index=index).release()
        text = refused(model, "csr", {"online": online + 1, "index": index}, chosen)
        assert all(part in text for part in ("65536", "65537", f"online={online + 1}", "16-bit")), text
    many = changed(artifact, keys_dictionary=atoms(2, 2**16 + 1, 32))
    text = refused(model, "csr", {"index": index}, many)
    assert all(part in text for part in ("65536", "65537", "16-bit")), text


def test_no_atoms_at_all(model, artifact):
    for options in ({"online": 0}, {"online": 0, "tiers": TIERS}, {"online": "offline"}):
        text = refused(model, "csr", options)
        assert all(
            part in text for part in ("without an artifact", f"online={options['online']!r}", "Artifact.load")
        ), text
    compress(model, "csr", artifact, online=0).release()
    compress(model, "csr", online=1).release()


# --- artifacts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"online": 64}, {"tiers": TIERS}], ids=str)
@pytest.mark.parametrize("stream", ["keys", "values"])
def test_an_artifact_without_dictionaries(model, artifact, stream, options):
    text = refused(model, "csr", options, changed(artifact, **{f"{stream}_dictionary": None}), ArtifactError)
    expected = ["method 'csr'", f"'{stream}.dictionary'", "'dictionaries' of `calib fit`", "it holds "]
    assert all(part in text for part in expected), text


def test_an_artifact_without_layer_groups(artifact):
    """Without layer groups the artifact itself cannot be made."""
    with pytest.raises(ArtifactError, match=r"'keys\.dictionary'.*'keys\.layer_groups' is not.*calib fit") as error:
        changed(artifact, keys_layer_groups=None)
    message(error)


@pytest.mark.parametrize(("chunks", "width"), [(1, 32), (4, 8), (8, 4)])
def test_value_chunks_that_a_dictionary_was_not_fitted_for(model, artifact, chunks, width):
    """The dictionary has atoms of 16 channels, for 2 chunks of a head of 32."""
    text = refused(model, "csr", {"value_chunks": chunks}, artifact)
    assert all(part in text for part in ("16 channels", str(width), "leave value_chunks out", "fit again")), text
    other = dictionaries(model, ATOMS // 2, value_chunks=chunks)
    compress(model, "csr", other).release()  # without the option it is the artifact's
    text = refused(model, "csr", {"value_chunks": 2}, other)
    assert all(part in text for part in (f"{width} channels", "16", "value_chunks")), text


def test_key_chunks_that_a_dictionary_was_not_fitted_for(model, artifact):
    """The message does not name `value_chunks`, which would be no remedy."""
    narrow = changed(artifact, keys_dictionary=atoms(2, ATOMS, 16))
    compress(model, "csr", narrow).release()  # without the option it is the artifact's
    for chosen, chunks, widths in ((artifact, 2, ("16 channels", "32 channels")), (narrow, 1, ("32 channels", "16"))):
        text = refused(model, "csr", {"key_chunks": chunks}, chosen)
        assert all(part in text for part in (*widths, "leave key_chunks out", "fit again")), text
        assert "value_chunks" not in text, text


@pytest.mark.parametrize("width", [12, 64])
def test_a_dictionary_that_fits_no_head(artifact, width):
    with pytest.raises(
        ArtifactError, match=rf"'values\.dictionary'.*{width} channels.*divisor of head_dim 32"
    ) as error:
        changed(artifact, values_dictionary=atoms(2, ATOMS, width))
    message(error)


def test_an_artifact_of_another_model(artifact):
    other = random_model("llama", num_key_value_heads=1)
    refused(other, "csr", {}, artifact, ArtifactError)


# --- models whose keys cannot be unrotated ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tiers": TIERS}], ids=str)
@pytest.mark.parametrize(("make", "reason"), UNROTATABLE)
def test_a_rope_that_cannot_be_turned(make, reason, options):
    """The message names another method as the remedy, and no option `positions`, which `csr` does not have."""
    model = make()
    text = refused(model, "csr", options)
    assert text.startswith(type(model).__name__) and reason in text and "such as 'kivi'" in text, text
    assert "positions" not in text
