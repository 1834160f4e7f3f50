"""Errors with the hub: a message of one line that says what to do; no token is in the message, its causes or the log."""

import logging
import traceback

import pytest
from toy_artifact import toy_artifact
from toy_hub import TOKEN, Repo, used

from calib.runtime import Artifact, ArtifactError

NAME = "calib.safetensors"
SECRET = "hf_SecretSecretSecret"  # the stand-in hub does not accept it


@pytest.fixture
def hub(monkeypatch, tmp_path):
    found = used(monkeypatch, tmp_path / "home", token=SECRET)
    monkeypatch.chdir(tmp_path)
    repo = found.repos["someone/tiny"] = Repo()
    repo.commit("main", {NAME: toy_artifact().encoded()})
    broken = found.repos["someone/broken"] = Repo()
    broken.commit("main", {NAME: toy_artifact().encoded()[:-3]})
    found.repos["someone/gated"] = Repo(gated=True)
    yield found
    found.stop()


def refused(caplog, action) -> str:
    """Returns the error's message; asserts that it is one line, and that no token is in it, its causes or the log."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ArtifactError) as caught:
        action()
    line = str(caught.value)
    assert line.count("\n") == 0
    assert len(line) < 420
    shown = line + caplog.text + "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert TOKEN not in shown
    return line


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("someone/none", {}, ["no such repository", "hf auth login"]),
        ("someone/tiny", {"revision": "v9"}, ["no revision 'v9'", "branch, a tag or a whole commit hash"]),
        ("someone/gated", {}, ["gated", "/someone/gated", "hf auth login"]),
        ("someone/tiny", {"filename": "else.safetensors"}, ["no file 'else.safetensors' in main"]),
        ("someone/tiny", {"filename": "../x"}, ["'../x'", "not inside the repository"]),
        ("someone/tiny", {"cache_dir": "file"}, ["cache cannot be used", "cache_dir="]),
        ("some one/tiny", {}, ["owner/name"]),
        ("some\0one", {}, ["owner/name"]),
        ("someone/tiny", {"token": f"{SECRET}\n"}, ["token", "line ends"]),
        ("someone/tiny", {"token": ""}, ["token", "empty"]),
        ("someone/tiny", {"force_download": True, "local_files_only": True}, ["exclude each other"]),
        ("someone/broken", {}, [NAME, "truncated"]),
        ("someone/tiny/deep", {}, ["someone/tiny/deep", "no such file"]),
        ("missing.safetensors", {"revision": "v9"}, ["no such file"]),
        ("../missing", {}, ["no such file"]),
        (".", {}, ["holds no calib.safetensors", "calib fit"]),
        (".", {"revision": "main"}, ["is a local path, which has no revisions", "revision='main'"]),
        ("file", {"filename": "x"}, ["is no folder", "filename='x'"]),
    ],
)
def test_from_pretrained(hub, caplog, tmp_path, name, options, parts):
    (tmp_path / "file").write_bytes(b"")
    line = refused(caplog, lambda: Artifact.from_pretrained(name, **options))
    assert all(part in line for part in parts), line


def test_a_stored_token_is_asked_for_and_there_is_none(hub, caplog, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    line = refused(caplog, lambda: Artifact.from_pretrained("someone/tiny", token=True))
    assert "hf auth login" in line


@pytest.mark.parametrize(
    ("offline", "stopped", "options", "parts"),
    [
        (True, False, {}, ["HF_HUB_OFFLINE", "hf download someone/tiny calib.safetensors"]),
        (True, False, {"force_download": True}, ["HF_HUB_OFFLINE"]),
        (False, False, {"local_files_only": True, "revision": "v1"}, ["local_files_only", "--revision v1"]),
        (False, True, {}, ["cannot be reached"]),
        (False, True, {"force_download": True}, ["cannot be reached"]),
    ],
)
def test_no_network_and_no_copy(hub, caplog, monkeypatch, offline, stopped, options, parts):
    if stopped:
        hub.stop()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    line = refused(caplog, lambda: Artifact.from_pretrained("someone/tiny", **options))
    assert all(part in line for part in parts), line
    assert stopped or not hub.requests


def test_what_answers_is_no_hub(hub, caplog, monkeypatch):
    monkeypatch.setattr("toy_hub.Handler.resolve", lambda handler, **parts: handler.send(200, b"welcome", ETag='"x"'))
    line = refused(caplog, lambda: Artifact.from_pretrained("someone/tiny"))
    assert "does not answer as the hub does" in line


@pytest.mark.parametrize(
    ("repo", "options", "parts"),
    [
        ("someone/tiny", {}, ["hf auth login"]),
        ("someone/tiny", {"token": False}, ["hf auth login"]),
        ("someone/tiny", {"token": f"{TOKEN} "}, ["token", "spaces"]),
        ("some one", {"token": TOKEN}, ["owner/name"]),
        ("someone/tiny", {"token": TOKEN, "license": "unheard"}, ["license", "must be one of", "change"]),
        ("someone/tiny", {"token": TOKEN, "commit_message": ""}, ["commit_message"]),
        ("someone/tiny", {"token": TOKEN, "revision": "v9", "create_pr": True}, ["no revision 'v9'"]),
    ],
)
def test_push_to_hub(hub, caplog, repo, options, parts):
    before = dict(hub.repos["someone/tiny"].refs)
    line = refused(caplog, lambda: toy_artifact().push_to_hub(repo, **options))
    assert all(part in line for part in parts), line
    assert hub.repos["someone/tiny"].refs == before


def test_a_push_the_hub_fails_at(hub, caplog, monkeypatch):
    hub.broken = True
    line = refused(caplog, lambda: toy_artifact().push_to_hub("someone/new", token=TOKEN))
    assert "answered 500 (out of order)" in line
    hub.broken = False
    monkeypatch.setattr("toy_hub.Handler.upload", lambda handler, oid: handler.send(403, {"error": "expired"}))
    line = refused(caplog, lambda: toy_artifact().push_to_hub("someone/new", token=TOKEN))
    assert "does not allow it" in line
    hub.stop()
    assert "cannot be reached" in refused(caplog, lambda: toy_artifact().push_to_hub("someone/new", token=TOKEN))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(caplog, lambda: toy_artifact().push_to_hub("someone/new", token=TOKEN))


def test_a_hub_that_says_the_token_aloud(hub, monkeypatch):
    monkeypatch.setattr("toy_hub.Handler.create", lambda handler: handler.send(500, {"error": f"bad {handler.token}"}))
    with pytest.raises(ArtifactError, match=r"answered 500 \(bad \[token\]\)"):
        toy_artifact().push_to_hub("someone/new", token=TOKEN)


def test_names_in_a_repository_are_not_obeyed_and_not_printed_whole(hub, caplog):
    hub.repos["someone/names"] = names = Repo()
    names.commit("main", {f"\x1b[31m{letter * 150}.{NAME}": b"" for letter in "ab"})
    line = refused(caplog, lambda: Artifact.from_pretrained("someone/names"))
    assert line.isprintable() and "holds 2 artifacts (" in line
