"""A model on several devices, or on disk: the same statistics, and one layer at a time in memory."""

import dataclasses
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from live_tensors import live_tensors
from simulated_devices import SimulatedDevices, on
from toy_language_model import SIZES, toy_model, toy_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from calib.capture.capture import stream
from calib.capture.device_map import entry_device
from calib.capture.generated import generated_sequences
from calib.cli import main
from calib.fit.calibration import Calibration
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.fingerprint import fingerprint

SMALL = [
    "--model.bits=[2]", "--model.clip_factors=[1,0.8]", "--model.query_rows=2", "--model.clip_sequences=2",
    "--data.length=64", "--data.sequences=4", "--data.heldout_sequences=1", "--data.batch_size=2",
    "--model.dictionary.atoms=8", "--model.dictionary.samples=200", "--model.dictionary.heldout_samples=50",
    "--model.dictionary.keys_sparsity=2", "--model.dictionary.values_sparsity=2", "--model.dictionary.epochs=1",
    "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false",
]  # fmt: skip
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def words(toy: Path, *more: str) -> list[str]:
    return ["fit", f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", *SMALL, *more]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 259, (2, 64), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :9] = False
    return tokens, mask, torch.arange(128).view(2, 64)


@pytest.mark.full
def test_layers_on_two_devices_are_measured_into_statistics_on_one():
    """The forward pass runs on the CPU; each layer's sample is then put on one of two simulated devices."""
    model = toy_model()

    def fitted(apart: bool) -> Calibration:
        forms = {"keys": ["*x1"], "values": ["1x*"]}
        calibration = Calibration(
            "toy", bits=[2], clip_factors=[1, 0.8], query_rows=2, residual_bits=[2], residual_forms=forms
        )
        calibration.prepare(model, 0)
        if apart:
            for module in calibration.modules():
                module._buffers.update({name: on("meta:0", x) for name, x in module._buffers.items()})

        def sink(sample):
            parts = {name: x for name, x in vars(sample).items() if isinstance(x, torch.Tensor)}
            device = f"meta:{sample.layer % 2}"
            moved = {name: on(device, x.contiguous()) for name, x in parts.items()} if apart else {}
            with SimulatedDevices():
                here = dataclasses.replace(sample, **moved)
                calibration.observe(dataclasses.replace(here, taken_at=here))

        for stage in calibration.stages():
            with SimulatedDevices():
                calibration.begin(stage)
            stream(model, *batch(), sink)
        return calibration

    one, two = fitted(False), fitted(True)
    for name, buffer in one.named_buffers():
        found = dict(two.named_buffers())[name]
        assert str(found.device) == "meta:0", name
        assert torch.equal(found.held, buffer), name
    assert bool(one.statistics["heldout"].error.all())
    with pytest.raises(RuntimeError, match="meta:0 and meta:1"), SimulatedDevices():
        on("meta:0", torch.ones(2)) + on("meta:1", torch.ones(2))


def layers(number: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"num_hidden_layers": number})).eval()


def held(model: PreTrainedModel) -> tuple[int, int]:
    """Bytes beside the model and the batch while the sink has the last layer's sample; and the bytes of the sample."""
    tokens, mask, index = batch()
    before, found = live_tensors()[1], []

    def sink(sample):
        if sample.layer == model.config.num_hidden_layers - 1:
            found.append(live_tensors()[1] - before)
            found.append(sum(x.nbytes for x in vars(sample).values() if isinstance(x, torch.Tensor)))

    stream(model, tokens, mask, index, sink)
    return tuple(found)


@pytest.mark.full
def test_twelve_layers_hold_what_two_do():
    few, sample = held(layers(2))
    many, _ = held(layers(12))
    assert few == many
    assert sample < many < 3 * sample


@pytest.mark.full
@needs_accelerate
def test_a_model_on_disk_holds_no_more_than_one_in_memory(tmp_path):
    layers(12).save_pretrained(tmp_path / "deep")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "deep")
    expected, weights = held(plain)[0], sum(x.nbytes for x in plain.parameters())
    del plain
    before = live_tensors()[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep", device_map="auto", max_memory={"cpu": 1000})
    assert set(model.hf_device_map.values()) == {"disk"}
    assert live_tensors()[1] - before < weights / 50
    assert held(model)[0] <= expected + 1000


@pytest.mark.full
@needs_accelerate
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_partly_on_disk_gives_the_same_artifact(toy, dtype):
    """`auto` on a machine without a GPU fills the host's memory first; what is left stays in the checkpoint."""
    assert main(words(toy, f"--model.dtype={dtype}", "--output=whole.safetensors")) == 0
    spread = ["--model.device_map=auto", "--model.max_memory={cpu: 200KB}"]
    assert main(words(toy, f"--model.dtype={dtype}", "--output=spread.safetensors", *spread)) == 0
    assert Path("spread.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()
    Artifact.load("spread.safetensors").check(AutoModelForCausalLM.from_pretrained(toy / "llama", dtype=dtype))


@pytest.mark.full
@needs_accelerate
def test_nothing_of_a_model_in_memory(toy):
    """Its first parameter is on the meta device, so `model.device` does not tell on which device tokens must be."""
    model = AutoModelForCausalLM.from_pretrained(toy / "llama", device_map="auto", max_memory={"cpu": 1000})
    assert model.device.type == "meta"
    assert entry_device(model).type == "cpu"
    made = [generated_sequences(one, toy_tokenizer(), 40, 4, seed=3) for one in (model, toy_model())]
    assert torch.equal(*made)
    assert fingerprint(model)["weights"] == fingerprint(toy_model())["weights"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.device_map=all"], "invalid value all for 'model.device_map'"),
        (["--model.max_memory={0: 1GB}"], "model.max_memory bounds what a device map uses: give model.device_map=auto"),
        (["--model.device_map=auto", "--model.max_memory={gpu: 1GB}"], "'gpu' is no device; expected the number of a"),
        (
            ["--model.device_map=auto", "--trainer.devices=2"],
            "each of 2 processes needs a whole one of its own: give --trainer.devices 1, or no model.device_map",
        ),
    ],
)
def test_what_cannot_be_is_one_line(toy, capsys, monkeypatch, more, message):
    monkeypatch.setattr("calib.capture.device_map.find_spec", lambda name: name)  # accelerate counts as installed
    assert main(words(toy, "--output=toy.safetensors", *more)) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert message in error


def test_without_accelerate_one_line_says_what_to_install(toy, capsys, monkeypatch):
    monkeypatch.setattr("calib.capture.device_map.find_spec", lambda name: None)
    assert main(words(toy, "--output=toy.safetensors", "--model.device_map=auto")) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error == "calib: error: model.device_map=auto needs the package accelerate: pip install accelerate"


DOCUMENT = Path(__file__).parents[2] / "docs/scale.md"


@pytest.mark.full
@pytest.mark.parametrize("command", re.findall(r"^    calib (fit .*)$", DOCUMENT.read_text("utf-8"), re.MULTILINE))
def test_the_documented_commands_run(toy, command):
    """With a toy model, little of everything and one CPU instead of what they are written for."""
    if "70b" in command:
        pytest.importorskip("accelerate")
    memory = ["--model.max_memory={cpu: 200KB}"] if "70b" in command else []
    given = [*shlex.split(command), *words(toy)[1:], *memory, "--output=toy.safetensors", "--trainer.devices=1"]
    assert main([*given, "--model.dtype=float32", "--model.dictionary.batch_size=64"]) == 0
    assert Path("toy.safetensors").exists() != ("--plan" in command)
