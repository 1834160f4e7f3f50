"""Malformed layer groups, divergences and dictionaries in an artifact: each is refused in one line."""

import math

import pytest
import torch
from forged_artifact import forged_tensor, refused
from toy_artifact import toy_artifact, toy_tensors

from calib.runtime.artifact.artifact import ArtifactError


def changed(name: str, change) -> dict[str, torch.Tensor]:
    """The toy artifact's tensors, with `change` applied to one of them."""
    tensors = toy_tensors()
    tensors[name] = change(tensors[name].clone())
    return tensors


def put(position, value):
    """A change that sets one entry."""

    def change(tensor):
        tensor[position] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("keys.layer_groups", lambda x: x.int(), r"is torch\.int32 \[2\], expected torch\.int64 \[2\] = \[layers\]"),
        ("keys.layer_groups", lambda x: x[:1], r"is torch\.int64 \[1\], expected torch\.int64 \[2\]"),
        ("keys.layer_groups", lambda x: x + 1, r"is \[1, 2\], expected groups from 0 on"),
        ("keys.layer_groups", lambda x: 2 * x, r"is \[0, 2\], expected groups from 0 on, each layer's the same"),
        ("keys.layer_groups", lambda x: -x, r"is \[0, -1\], expected groups"),
        ("values.divergence", lambda x: x.double(), r"is torch\.float64 \[2, 2\], expected torch\.float32"),
        ("values.divergence", lambda x: x[:1], r"is torch\.float32 \[1, 2\], expected torch\.float32 \[2, 2\]"),
        ("values.divergence", put((0, 1), 0.7), "has values from 0 to 0.7, expected 0 to 0.693148"),
        ("values.divergence", put((0, 1), -0.1), "has values from -0.1 to [0-9.]+, expected 0 to 0.693148"),
        ("values.divergence", put((1, 1), 0.25), "is 0.25 between layer 1 and itself, expected 0"),
        (
            "values.divergence",
            put((1, 0), 0.5),
            r"between layers 0 and 1 and 0\.5 the other way round, expected the same",
        ),
        ("keys.dictionary", lambda x: x.float(), r"is torch\.float32 \[2, 16, 8\], expected torch\.float16"),
        (
            "keys.dictionary",
            lambda x: x[:1],
            r"\[1, 16, 8\], expected torch\.float16 \[2, 16, 8\] = \[groups, atoms, channels\]",
        ),
        ("values.dictionary", lambda x: x.repeat(2, 1, 1), r"\[2, 16, 4\], expected torch\.float16 \[1, 16, 4\]"),
        ("keys.dictionary", lambda x: x[:, :0], r"\[2, 0, 8\], expected torch\.float16 \[2, 1, 8\]"),
        ("keys.dictionary", lambda x: x[0], r"is torch\.float16 \[16, 8\], expected"),
        ("keys.dictionary", lambda x: x[..., :3], "has atoms of 3 channels, expected a divisor of head_dim 8"),
        (
            "keys.dictionary",
            lambda x: torch.cat([x, x], -1),
            "has atoms of 16 channels, expected a divisor of head_dim 8",
        ),
        ("keys.dictionary", lambda x: x * torch.tensor(1.01).half(), "at group 0, atom 0, expected 1 to 0.002"),
        ("keys.dictionary", put((1, 3), 0), "has norm 0 at group 1, atom 3, expected 1 to 0.002"),
    ],
)
def test_groups_divergences_and_dictionaries_that_cannot_be(name, change, message):
    with pytest.raises(ArtifactError, match=rf"^tensor '{name}' .*{message}") as caught:
        toy_artifact(tensors=changed(name, change))
    assert str(caught.value).endswith("run `calib fit` again")
    assert "\n" not in str(caught.value)


def test_a_dictionary_without_its_groups():
    tensors = toy_tensors()
    del tensors["values.layer_groups"]
    with pytest.raises(ArtifactError, match=r"'values\.dictionary' is present and 'values\.layer_groups' is not"):
        toy_artifact(tensors=tensors)
    del tensors["values.dictionary"]
    assert toy_artifact(tensors=tensors).has("values.divergence")


def test_a_forged_dictionary_is_refused_when_it_is_read(tmp_path):
    line = refused(tmp_path / "a", forged_tensor("keys.dictionary", torch.ones(2, 3, 8, dtype=torch.float16)))
    assert "tensor 'keys.dictionary' is present and 'keys.layer_groups' is not, expected both" in line


def test_rounding_to_float16_and_to_ln_2_is_no_fault():
    tensors = toy_tensors()
    generator = torch.Generator().manual_seed(3)
    atoms = torch.nn.functional.normalize(torch.randn(2, 5000, 8, generator=generator), dim=-1).half()
    apart = torch.full((2, 2), math.log(2)).fill_diagonal_(0)
    assert toy_artifact(tensors=tensors | {"keys.dictionary": atoms, "keys.divergence": apart}).has("keys.dictionary")
