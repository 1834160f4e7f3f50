"""The shared command line: merging, overrides, packaged configs, and one line for every mistake."""

import pytest
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning_utilities.core.imports import RequirementCache

from calib.bench.request_files import read_bench
from calib.config_files import find_config
from calib.errors import UsageError
from calib.evaluate.request_files import read_request
from calib.lightning_cli import CalibCLI
from calib.method_options import read_method


class Model(LightningModule):
    """A stand-in with typed options."""

    def __init__(self, bits: int = 2, sizes: list[int] | None = None, path: str = "nowhere") -> None:
        super().__init__()
        self.bits, self.sizes = bits, sizes


class Data(LightningDataModule):
    """A stand-in with typed options."""

    def __init__(self, length: int = 512) -> None:
        super().__init__()
        self.length = length


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parse(*words: str) -> CalibCLI:
    return CalibCLI("fit", Model, Data, words, {"accelerator": "cpu", "logger": False})


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_configs_merge_from_left_to_right_and_overrides_win(tmp_path):
    (tmp_path / "one.yaml").write_text("model: {bits: 3, sizes: [1, 2]}\ndata: {length: 64}\n")
    (tmp_path / "two.yaml").write_text("model: {bits: 4}\ntrainer: {max_epochs: 7}\n")
    cli = parse("--config", "one.yaml", "--config=two.yaml", "--data.length", "96", "--ckpt_path", "last")
    assert (cli.model.bits, cli.model.sizes, cli.datamodule.length) == (4, [1, 2], 96)
    assert cli.trainer.max_epochs == 7
    assert cli.config.ckpt_path == "last"


def test_print_config_and_help_leave_with_status_0(capsys):
    shown = []
    for words in (["--model.bits", "3", "--print_config"], ["--help"]):
        with pytest.raises(SystemExit) as caught:
            parse(*words)
        assert caught.value.code == 0
        shown.append(capsys.readouterr().out)
    config, usage = yaml.safe_load(shown[0]), shown[1]
    assert (config["model"]["bits"], config["data"]["length"]) == (3, 512)
    assert usage.startswith("usage: ") and "calib fit" in usage and "--model.bits" in usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.bit", "3"], "unknown key 'model.bit' (did you mean 'model.bits'?)"),
        (["--model.bit=3"], "unknown key 'model.bit' (did you mean 'model.bits'?)"),
        (["--trainer.max_epoch", "3"], "unknown key 'trainer.max_epoch' (did you mean 'trainer.max_epochs'?)"),
        (["--zzz", "3"], "unknown key 'zzz' (known: ckpt_path, config, data, model"),
        (["--model.bits", "many"], "invalid value 'many' for 'model.bits' (expected int)"),
        (["--model.sizes", "[1, x]"], "invalid value [1, 'x'] for 'model.sizes' (expected list[int] or null)"),
        (["--model.bits"], "--model.bits: expected one argument"),
        (["stray"], "unexpected argument 'stray'"),
        (["--trainer.accelerator", "abacus"], "trainer: You selected an invalid accelerator name"),
        (["--trainer.logger", "CSVLogger"], "CSVLogger: the following arguments are required: save_dir"),
        (["--trainer.callbacks", "Timer", "--trainer.callbacks.odd", "3"], "Timer: Option 'odd' is not accepted"),
        (["--config", "nowhere.yaml"], "no configuration file 'nowhere.yaml', neither here nor in the package"),
    ],
)
def test_mistakes_on_the_command_line(words, message):
    assert message in refused(*words)


def test_a_logger_without_its_package_is_told_in_its_own_words(monkeypatch):
    for name in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{name}", RequirementCache("no-such-package"))
    told = refused("--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", "x")
    assert (
        told.startswith("TensorBoardLogger: Neither `tensorboard` nor `tensorboardX` is available") and len(told) < 300
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model:\n  bit: 3\n", "unknown key 'model.bit' (did you mean 'model.bits'?)"),
        ("modell:\n  bits: 3\n", "unknown key 'modell' (did you mean 'model'?)"),
        ("model:\n  bits: {a: 1}\n", "for 'model.bits'"),
        ("model: 3\n", "'model' in 'bad.yaml' must be a mapping of options, got 3"),
        ("model: [\n", "'bad.yaml' is not valid YAML, line 2"),
        ("", "the configuration file 'bad.yaml' is empty"),
        ("- 1\n- 2\n", "the configuration file 'bad.yaml' holds a list"),
        (b"\xff\xfe\x00", "cannot read the configuration file 'bad.yaml': not UTF-8 text"),
    ],
)
def test_mistakes_in_a_file(tmp_path, content, message):
    (tmp_path / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused("--config", "bad.yaml")


def test_a_folder_is_no_config(tmp_path):
    assert "Is a directory" in refused("--config", str(tmp_path))


def test_packaged_configs_are_found_from_anywhere_and_local_ones_win(tmp_path):
    assert find_config("llama2.yaml").is_file()
    assert find_config("configs/llama2.yaml").read_bytes() == find_config("llama2.yaml").read_bytes()
    (tmp_path / "llama2.yaml").write_text("model: {bits: 1}\n")
    assert find_config("llama2.yaml").read_text() == "model: {bits: 1}\n"
    with pytest.raises(UsageError, match="no configuration file"):
        find_config("/llama2.yaml")
    with pytest.raises(UsageError, match="no configuration file"):
        find_config("../configs/llama2.yaml")


@pytest.mark.parametrize(
    ("read", "own", "other"),
    [
        (find_config, "tiny.yaml", "quick.yaml"),
        (lambda name: read_request([name], []), "eval/quick.yaml", "tiny.yaml"),
        (lambda name: read_bench([name], []), "bench/quick.yaml", "tiny.yaml"),
        (read_method, "methods/kivi.yaml", "tiny.yaml"),
    ],
)
def test_who_misses_a_config_is_told_of_those_that_the_command_reads(read, own, other):
    with pytest.raises(UsageError) as error:
        read("nothere.yaml")
    assert own in str(error.value) and other not in str(error.value)
