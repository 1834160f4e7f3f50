"""A headless Chromium for tests, controlled through two pipes (the DevTools protocol): no driver, no port, no network.

It opens a page from a file and records the page's requests and errors.
"""

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, Self

PROGRAM = "chromium"
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe", "about:blank"),
]
SPARE = 16  # pipe ends are moved above it: the browser reads from 3 and writes to 4


class Browser:
    """A context with one browser with one page; leaving it ends the browser.

    Attributes:
        requests: URLs that the page requested, its own included.
        complaints: console messages, script errors, and log entries such as violations of the page's policy.
    """

    def __enter__(self) -> Self:
        self.profile = tempfile.mkdtemp()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.count = 0
        self.session: str | None = None  # commands go to the browser itself until a session with the page exists
        (read, self.writer), (reader, write) = pipe(), pipe()
        actions = [(os.POSIX_SPAWN_OPEN, out, os.devnull, os.O_WRONLY, 0) for out in (1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, read, 3), (os.POSIX_SPAWN_DUP2, write, 4)]
        flags = [*FLAGS, f"--user-data-dir={self.profile}"]
        self.process = os.posix_spawnp(PROGRAM, [PROGRAM, *flags], os.environ, file_actions=actions, setpgroup=0)
        os.close(read)
        os.close(write)
        self.reader = os.fdopen(reader, "rb")
        self.left = b""
        (target,) = [one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        asked = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = asked["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.writer)
        self.reader.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def ask(self, method: str, **parameters: Any) -> Any:
        """Send one command and return its result; raises RuntimeError if the browser reports an error."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.hear()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def hear(self) -> dict[str, Any]:
        """Return the browser's next message; requests and errors in it are recorded."""
        while b"\0" not in self.left:
            part = os.read(self.reader.fileno(), 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self.left += part
        text, self.left = self.left.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        what = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(what["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(what["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(what["args"]))
            case "Log.entryAdded":
                self.complaints.append(what["entry"]["text"])
        return message

    def open(self, file: Path, width: int, dark: bool = False) -> None:
        """Show the file in a window `width` pixels wide and wait until it has loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=file.resolve().as_uri())
        while self.hear().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """Return the value of a script's expression; raises RuntimeError if the script throws."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def picture(self, file: Path, top: int = 0, height: int = 900) -> None:
        """Write a part of the page, `height` pixels from `top` on, as PNG."""
        width = self.run("innerWidth")
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        shot = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


def pipe() -> tuple[int, int]:
    """Both ends of a pipe, with file descriptors from SPARE on, so that they do not collide with 3 and 4."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, SPARE) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
