"""`calib fit --config llama2.yaml` if the hub cannot be reached or refuses the model: one line, without delay."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session, hf_raise_for_status

from calib.capture.language_model import load, why_the_hub_gave_none
from calib.errors import UsageError

NAME = "meta-llama/Llama-2-7b-hf"
SECONDS = 20  # enough with imports on a free core; waiting for a network would take longer
NOBODY = "http://127.0.0.1:9"  # a port without a server


@contextmanager
def hub(status: int, code: str | None) -> Iterator[str]:
    """A hub that answers every request with `status` and, as the real one does, with the reason in a header; yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refused(folder: Path, endpoint: str) -> str:
    """Run the command in a process without login, cache and proxy; assert status 2 and one line on stderr; return it."""
    own = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy") and key[:3] != "HF_"}
    own |= {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(Path.cwd())}
    code = "import sys; from calib.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "fit", "--config", "llama2.yaml"]
    begin = time.monotonic()
    result = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=120)
    # Twice the time, since another test may run on the same core.
    assert time.monotonic() - begin < 2 * SECONDS
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2 and len(lines) == 1 and len(lines[0]) < 400, result.stderr
    assert not list(folder.rglob("*.safetensors"))
    return lines[0]


@pytest.mark.full
def test_without_a_network_it_stops_at_once_and_says_what_to_do(tmp_path):
    line = refused(tmp_path, NOBODY)
    assert line.startswith(f"calib: error: no folder '{NAME}' here, and the Hugging Face hub cannot be reached")
    assert "licence accepted on its page and `hf auth login`" in line
    assert line.endswith("without network name a folder that holds the model")


@pytest.mark.full
def test_a_gated_model_wants_its_licence_accepted(tmp_path):
    with hub(401, "GatedRepo") as endpoint:
        assert refused(tmp_path, endpoint) == (
            f"calib: error: the Hugging Face hub does not give '{NAME}' to you yet (status 401): accept its licence at "
            f"{endpoint}/{NAME} and log in with `hf auth login`, or name a folder that holds the model"
        )


@pytest.mark.parametrize(
    ("status", "code", "line"),
    [
        (403, "GatedRepo", "does not give 'owner/name' to you yet (status 403): accept its licence at"),
        (403, None, "does not give 'owner/name' to you yet (status 403): accept its licence at"),
        (401, "RepoNotFound", "knows no model 'owner/name', or it is private (status 401): check the name"),
        (404, "RepoNotFound", "knows no model 'owner/name', or it is private (status 404): check the name"),
        (500, None, "gave none (OSError: no luck); a gated model wants"),
    ],
)
def test_what_the_hub_answers_is_told(monkeypatch, status, code, line):
    """The errors come from the hub's library, as the cause of an OSError that transformers raises."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with hub(status, code) as endpoint, pytest.raises(HfHubHTTPError) as caught:
        hf_raise_for_status(get_session().head(f"{endpoint}/owner/name/resolve/main/config.json"))
    error = OSError("no luck")
    error.__cause__ = caught.value
    told = why_the_hub_gave_none("owner/name", error, "OSError: no luck")
    assert line in told and told.endswith("name a folder that holds the model") and len(told) < 400


def test_offline_by_choice_is_told_like_no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError, match="no folder 'calib-tests/none' here, and the Hugging Face hub cannot be reached"
    ):
        load("calib-tests/none", "float32")
