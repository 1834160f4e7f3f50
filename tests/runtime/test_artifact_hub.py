"""Artifacts pushed to a hub and loaded from it, by huggingface_hub's client and a stand-in server; folders need no hub."""

import os
import subprocess
import sys

import pytest
import torch
from toy_artifact import toy_artifact
from toy_hub import TOKEN, Repo, used

from calib.cli import main
from calib.runtime import Artifact, ArtifactError

NAME, CARD = "calib.safetensors", "README.md"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    found = used(monkeypatch, tmp_path / "home")
    yield found
    found.stop()


def other_artifact() -> Artifact:
    return toy_artifact(tensors={"later": torch.arange(5.0)})


def same(one: Artifact, two: Artifact) -> bool:
    return one.encoded() == two.encoded()


def test_a_folder_is_written_and_read_without_the_hub(hub, tmp_path):
    artifact, folder = toy_artifact(), tmp_path / "new" / "folder"
    artifact.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == [CARD, NAME]
    assert (folder / NAME).read_bytes() == artifact.encoded()
    for name in (folder, str(folder), folder / NAME):
        assert same(Artifact.from_pretrained(name), artifact)
    card = (folder / CARD).read_bytes()
    artifact.save_pretrained(folder)
    assert (folder / CARD).read_bytes() == card
    other_artifact().save_pretrained(folder, license="mit")  # a card that calib wrote is overwritten
    assert b"license: mit" in (folder / CARD).read_bytes() != card
    assert same(Artifact.from_pretrained(folder), other_artifact())
    assert not hub.requests


def test_the_file_of_a_folder(tmp_path):
    first, second = toy_artifact(), other_artifact()
    first.save(tmp_path / "one.calib.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"a model's")
    assert same(Artifact.from_pretrained(tmp_path), first)
    second.save(tmp_path / "two.calib.safetensors")
    with pytest.raises(ArtifactError, match=r"holds 2 artifacts \(one\.calib.*, two\.calib.*filename="):
        Artifact.from_pretrained(tmp_path)
    assert same(Artifact.from_pretrained(tmp_path, filename="two.calib.safetensors"), second)
    second.save(tmp_path / NAME)
    assert same(Artifact.from_pretrained(tmp_path), second)


def test_a_models_own_card_stays(hub, tmp_path):
    mine = "---\nlibrary_name: transformers\n---\n# A model\nlibrary_name: calib\n"
    (tmp_path / CARD).write_text(mine)
    toy_artifact().save_pretrained(tmp_path)
    hub.repos["someone/model"] = repo = Repo()
    before = repo.commit("main", {CARD: mine.encode()})
    toy_artifact().push_to_hub("someone/model")
    assert (tmp_path / CARD).read_text() == mine
    assert repo.commits[repo.refs["main"]] == {CARD: mine.encode(), NAME: toy_artifact().encoded()}
    now = repo.refs["main"]
    for refused in (
        lambda: other_artifact().save_pretrained(tmp_path, license="mit"),
        lambda: other_artifact().push_to_hub("someone/model", base_model="a/b"),
    ):
        with pytest.raises(ArtifactError, match=r"README\.md there is not calib's"):
            refused()
    assert same(Artifact.from_pretrained(tmp_path), toy_artifact())  # nothing half-written
    assert repo.refs["main"] == now != before


def test_push_and_pull(hub):
    artifact = toy_artifact()
    info = artifact.push_to_hub("tiny", private=True, commit_message="first", license="apache-2.0")
    repo = hub.repos["someone/tiny"]  # the owner is the token's user
    assert repo.private
    assert info.oid == repo.refs["main"]
    assert hub.messages == ["first"]
    assert len(hub.asked("PUT")) == 1  # by LFS, as the hub wants safetensors
    assert repo.commits[info.oid].keys() == {NAME, CARD}
    assert b'Artifact.from_pretrained("someone/tiny")' in repo.commits[info.oid][CARD]
    hub.requests.clear()
    assert same(Artifact.from_pretrained("someone/tiny"), artifact)
    assert [(method, path.split("/")[1], token) for method, path, token in hub.requests] == [
        ("HEAD", "someone", TOKEN),
        ("GET", "lfs", None),  # the bytes may be on another server, which must not get the token
    ]
    hub.requests.clear()
    assert artifact.push_to_hub("someone/tiny", license="apache-2.0").oid == info.oid  # nothing new, no commit
    assert same(Artifact.from_pretrained("someone/tiny"), artifact)
    assert not [path for path in hub.asked("GET") if "lfs" in path]  # from the cache
    assert same(Artifact.from_pretrained("someone/tiny", force_download=True), artifact)
    assert [path for path in hub.asked("GET") if "lfs" in path]


def test_revisions(hub, tmp_path):
    old, new = toy_artifact(), other_artifact()
    first = old.push_to_hub("someone/tiny").oid
    hub.repos["someone/tiny"].refs["v1"] = first
    second = new.push_to_hub("someone/tiny").oid
    assert second != first
    for revision in (first, "v1"):
        assert same(Artifact.from_pretrained("someone/tiny", revision=revision), old)
    for revision in (second, "main", None):
        assert same(Artifact.from_pretrained("someone/tiny", revision=revision), new)
    branch = old.push_to_hub("someone/tiny", revision="trial")
    assert branch.oid == hub.repos["someone/tiny"].refs["trial"]
    assert same(Artifact.from_pretrained("someone/tiny", revision="trial"), old)
    request = old.push_to_hub("someone/tiny", create_pr=True)
    assert (request.pr_revision, request.pr_num) == ("refs/pr/1", 1)
    assert same(Artifact.from_pretrained("someone/tiny", revision=request.pr_revision), old)
    assert hub.repos["someone/tiny"].refs["main"] == second
    place = tmp_path / "elsewhere"
    assert same(Artifact.from_pretrained("someone/tiny", cache_dir=place), new)
    assert any(place.rglob(NAME))


@pytest.mark.full
def test_what_was_downloaded_is_there_without_a_network(hub, tmp_path, monkeypatch):
    old, new = toy_artifact(), other_artifact()
    first = old.push_to_hub("someone/tiny").oid
    Artifact.from_pretrained("someone/tiny")
    new.push_to_hub("someone/tiny")
    assert same(
        Artifact.from_pretrained("someone/tiny", local_files_only=True), old
    )  # the newer commit is not requested
    assert same(Artifact.from_pretrained("someone/tiny"), new)
    hub.repos["someone/other"] = Repo()
    hub.repos["someone/other"].refs["next"] = "0" * 40
    for branch, artifact in (("main", old), ("next", new)):
        hub.repos["someone/other"].commit(branch, {f"{branch}.calib.safetensors": artifact.encoded()})
        assert same(Artifact.from_pretrained("someone/other", revision=branch), artifact)
    hub.stop()
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert same(Artifact.from_pretrained("someone/tiny"), new)
        assert same(Artifact.from_pretrained("someone/tiny", revision=first), old)
        assert same(Artifact.from_pretrained("someone/tiny", local_files_only=True), new)
        if offline:  # with several tries before, in the oldest client by one that cannot be used again
            assert same(Artifact.from_pretrained("someone/other"), old)
            assert same(Artifact.from_pretrained("someone/other", revision="next"), new)
    fresh = subprocess.run(
        [
            sys.executable,
            "-c",
            "from calib.runtime import Artifact; print(Artifact.from_pretrained('someone/tiny').tensors)",
        ],
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert fresh.stdout.strip() == str(new.tensors), fresh.stderr


def test_a_repository_with_an_artifact_by_another_name(hub):
    repo = hub.repos["someone/many"] = Repo()
    first, second = toy_artifact(), other_artifact()
    repo.commit("main", {"model.safetensors": b"a model's", "old/my.calib.safetensors": first.encoded()})
    with pytest.raises(ArtifactError, match=r"someone/many: holds no calib\.safetensors"):
        Artifact.from_pretrained("someone/many")
    assert same(Artifact.from_pretrained("someone/many", filename="old/my.calib.safetensors"), first)
    repo.commit("main", {"one.calib.safetensors": first.encoded()})
    assert same(Artifact.from_pretrained("someone/many"), first)
    repo.commit("main", {"two.calib.safetensors": second.encoded()})
    with pytest.raises(ArtifactError, match=r"holds 2 artifacts \(one\.calib.*filename="):
        Artifact.from_pretrained("someone/many")
    assert same(Artifact.from_pretrained("someone/many", filename="two.calib.safetensors"), second)
    repo.commit("main", {NAME: second.encoded()})
    assert same(Artifact.from_pretrained("someone/many"), second)


def test_saved_and_pushed_at_once(hub, tmp_path):
    toy_artifact().save_pretrained(tmp_path / "tiny", push_to_hub=True, commit_message="both", base_model="a/b")
    toy_artifact().save_pretrained(tmp_path / "again", push_to_hub=True, repo_id="team/tiny", base_model="a/b")
    own, teams = (hub.repos[name] for name in ("someone/tiny", "team/tiny"))
    assert hub.messages[0] == "both"
    for repo in (own, teams):
        assert repo.commits[repo.refs["main"]][NAME] == (tmp_path / "tiny" / NAME).read_bytes()
    assert teams.commits[teams.refs["main"]][CARD] == (tmp_path / "again" / CARD).read_bytes()
    with pytest.raises(ArtifactError, match="private, token without push_to_hub=True"):
        toy_artifact().save_pretrained(tmp_path / "third", private=True, token="hf_x")
    assert not (tmp_path / "third").exists()


def test_inspect_takes_a_hub_name(hub, capsys):
    toy_artifact().push_to_hub("someone/tiny")
    assert main(["inspect", "someone/tiny"]) == 0
    assert "calib.safetensors, " in capsys.readouterr().out
    hub.stop()
    assert main(["inspect", "someone/tiny", "--json"]) == 0  # from the cache
    assert main(["inspect", "someone/never"]) == 1
    assert "hf download someone/never" in capsys.readouterr().err


def test_a_token_opens_gated_repositories(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    hub.repos["someone/gated"] = Repo(gated=True)
    hub.repos["someone/gated"].commit("main", {NAME: toy_artifact().encoded()})
    with pytest.raises(ArtifactError, match="gated"):
        Artifact.from_pretrained("someone/gated")
    assert same(Artifact.from_pretrained("someone/gated", token=TOKEN), toy_artifact())
