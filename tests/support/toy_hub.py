"""A hub in this process: the part of the Hugging Face Hub's HTTP interface that pushes and pulls of models use.

Commits, branches and pull requests are kept in memory. Safetensors files go through LFS (batch, upload, redirect to the stored
bytes), other files are sent in the commit. One token may write to every repository; reading needs it for gated ones alone.
"""

import hashlib
import json
import re
import threading
from base64 import b64decode
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants

TOKEN = "hf_WritesHere"
OWNER = "someone"  # whose token it is


@dataclass
class Repo:
    """`commits`: by hash, the files of each commit by path. `refs`: the commit of each branch, tag and pull request."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    refs: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    gated: bool = False
    private: bool | None = None

    def commit(self, ref: str, files: dict[str, bytes], into: str | None = None) -> str:
        """Add files on top of `ref` and point `into` (or `ref`) to the new commit; returns its hash."""
        content = self.commits[self.refs[ref]] | files
        count = str(len(self.commits)).encode()  # the same content twice is another commit
        name = hashlib.sha1(count + repr(sorted(content.items())).encode()).hexdigest()
        self.commits[name] = content
        self.refs[into or ref] = name
        return name


class ToyHub:
    """Serves until `stop`; `requests` are (method, path, token) of all requests so far."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}  # files in LFS, by SHA-256
        self.requests: list[tuple[str, str, str | None]] = []
        self.messages: list[str] = []
        self.broken = False  # if True, every POST but validate-yaml is answered with 500
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop the server; later requests find no connection."""
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()

    def asked(self, method: str) -> list[str]:
        """Paths of the requests so far with this HTTP method."""
        return [path for found, path, _ in self.requests if found == method]


def used(monkeypatch: pytest.MonkeyPatch, home: Path, token: str | None = TOKEN) -> ToyHub:
    """Return a new hub to which `huggingface_hub` connects until the end of the test, with a file cache of its own in `home`."""
    hub = ToyHub()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,  # the toy speaks LFS alone
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its retries
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    return hub


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: ToyHub

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self.serve()

    def do_GET(self) -> None:
        self.serve()

    def do_PUT(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def serve(self) -> None:
        url = urlsplit(self.path)
        authorization = self.headers.get("Authorization")
        self.token = authorization.removeprefix("Bearer ") if authorization else None
        self.hub.requests.append((self.command, url.path, self.token))
        self.query = parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for method, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, url.path)
            if found and method == ("GET" if self.command == "HEAD" else self.command):
                if method == "POST" and not url.path.endswith("validate-yaml"):  # PUTs have signed URLs, no token
                    if self.token != TOKEN:
                        return self.send(401, {"error": "Invalid username or password."})
                    if self.hub.broken:
                        return self.send(500, {"error": "out of order"})
                return getattr(self, answer)(**{name: unquote(part) for name, part in found.groupdict().items()})
        return self.send(404, {"error": f"the toy hub has no {self.command} {url.path}"})

    def send(self, status: int, content: Any = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def repo(self, name: str, revision: str) -> tuple[Repo, str, dict[str, bytes]] | None:
        """The repository, the commit's hash and its files; or None after an error response has been sent."""
        repo = self.hub.repos.get(name)
        if repo is None:
            return self.send(404 if self.token else 401, X_Error_Code="RepoNotFound")
        if repo.gated and self.token != TOKEN:
            return self.send(403 if self.token else 401, X_Error_Code="GatedRepo")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self.send(404, X_Error_Code="RevisionNotFound")
        return repo, commit, repo.commits[commit]

    def resolve(self, name: str, revision: str, path: str) -> None:
        if found := self.repo(name, revision):
            _, commit, files = found
            if path not in files:
                return self.send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            data = files[path]
            if not path.endswith(".safetensors"):
                return self.send(200, data, ETag=f'"{git_hash(data)}"', X_Repo_Commit=commit)
            oid = sha256(data)
            self.hub.stored[oid] = data
            self.send(
                302,
                Location=f"{self.hub.url.replace('127.0.0.1', 'localhost')}/lfs/{oid}",  # another host, as with the real hub
                X_Linked_ETag=f'"{oid}"',
                X_Linked_Size=str(len(data)),
                X_Repo_Commit=commit,
            )

    def stored(self, oid: str) -> None:
        self.send(200, self.hub.stored[oid], ETag=f'"{oid}"')

    def tree(self, name: str, revision: str) -> None:
        if found := self.repo(name, revision):
            _, _, files = found
            self.send(
                200,
                [{"type": "file", "path": p, "size": len(d), "oid": git_hash(d)} for p, d in files.items()],
            )

    def info(self, name: str, revision: str = "main") -> None:
        if found := self.repo(name, revision):
            self.send(200, {"id": name, "sha": found[1], "siblings": [{"rfilename": path} for path in found[2]]})

    def create(self) -> None:
        asked = json.loads(self.body)
        owner = asked.get("organization") or OWNER
        name = f"{owner}/{asked['name']}"
        status = 409 if name in self.hub.repos else 200
        private = (
            asked["private"] if "private" in asked else {"private": True, "public": False}.get(asked.get("visibility"))
        )
        self.hub.repos.setdefault(name, Repo(private=private))
        self.send(status, {"url": f"{self.hub.url}/{name}"})

    def branch(self, name: str, revision: str) -> None:
        if found := self.repo(name, "main"):
            if revision in found[0].refs:
                return self.send(409, {"error": "Reference already exists"})
            found[0].refs[revision] = found[1]
            self.send(200, {})

    def validate(self) -> None:
        front = yaml.safe_load(json.loads(self.body)["content"].split("---\n")[1])
        wrong = [{"message": '"license" must be one of [apache-2.0, ...]'}] if front.get("license") == "unheard" else []
        self.send(400 if wrong else 200, {"errors": wrong, "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        if found := self.repo(name, revision):
            answers = []
            for file in json.loads(self.body)["files"]:
                path, large = file["path"], file["path"].endswith(".safetensors")
                there = found[2].get(path)
                oid = None if there is None else (sha256 if large else git_hash)(there)
                mode = "lfs" if large else "regular"
                answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            self.send(200, {"files": answers})

    def batch(self, name: str) -> None:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            there = wanted["oid"] in self.hub.stored
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append({**wanted, **({} if there else {"actions": upload})})
        self.send(200, {"objects": objects, "transfer": "basic"})

    def upload(self, oid: str) -> None:
        if sha256(self.body) != oid:
            return self.send(400, {"error": "another SHA-256"})
        self.hub.stored[oid] = self.body
        self.send(200)

    def commit(self, name: str, revision: str) -> None:
        if found := self.repo(name, revision):
            repo, files = found[0], {}
            for item in map(json.loads, self.body.splitlines()):
                value = item["value"]
                match item["key"]:
                    case "header":
                        self.hub.messages.append(value["summary"])
                    case "file":
                        files[value["path"]] = b64decode(value["content"])
                    case "lfsFile":
                        files[value["path"]] = self.hub.stored[value["oid"]]
            number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
            request = f"refs/pr/{number}" if "create_pr" in self.query else None
            commit = repo.commit(revision, files, into=request)
            place = f"{self.hub.url}/{name}"
            self.send(
                200,
                {
                    "commitUrl": f"{place}/commit/{commit}",
                    "commitOid": commit,
                    "pullRequestUrl": f"{place}/discussions/{number}" if request else None,
                },
            )


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", rf"/{NAME}/resolve/{REVISION}/(?P<path>.+)", "resolve"),
    ("GET", r"/lfs/(?P<oid>\w+)", "stored"),
    ("GET", rf"/api/models/{NAME}/tree/{REVISION}", "tree"),
    ("GET", rf"/api/models/{NAME}", "info"),
    ("GET", rf"/api/models/{NAME}/revision/{REVISION}", "info"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", rf"/api/models/{NAME}/branch/{REVISION}", "branch"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"/api/models/{NAME}/preupload/{REVISION}", "preupload"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "upload"),
    ("POST", rf"/api/models/{NAME}/commit/{REVISION}", "commit"),
]
