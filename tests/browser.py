"""Chromium without a window, driven over the DevTools protocol through a pipe."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync
    --remote-debugging-pipe""".split()


class Browser:
    """One page. `events`: all that the browser reported about it, in order."""

    def __init__(self, requests: int, answers: Any) -> None:
        self._requests = requests
        self._answers = answers
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return json.loads(data)

    def open(self, path: Path, width: int, dark: bool) -> None:
        """Loads a file in a window of this width, in CSS pixels."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=path.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get(
            "value"
        )

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own."""
    assert CHROMIUM is not None
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        open(answered, "rb") as answers,
    ):
        # Chromium reads requests from descriptor 3 and answers on 4; a shell puts them there.
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{asked} 4>&{answer}', "bash", *command],
            stderr=subprocess.DEVNULL,
            pass_fds=(asked, answer),
        )
        os.close(asked)
        os.close(answer)
        try:
            yield Browser(ask, answers)
        finally:
            os.close(ask)
            process.terminate()
            process.wait()
