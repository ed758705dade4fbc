"""A headless Chromium, spoken to through its debugging pipe: what a page asks for, logs and looks like."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CANDIDATES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    return next((path for name in CANDIDATES if (path := shutil.which(name))), None)


class Page:
    """Opens one file. `requests`: every URL it asked for. `complaints`: console messages, exceptions, blocked loads."""

    def __init__(self, path: Path, profile: Path, seconds: float = 60.0) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._deadline = time.monotonic() + seconds
        self._count, self._rest, self._answers, self.loaded = 0, b"", {}, False
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        executable = find()
        assert executable is not None

        def place_pipes() -> None:
            # the browser reads commands from descriptor 3 and writes to 4
            high = [os.dup2(to_browser, 33), os.dup2(from_browser, 34)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Log", "Runtime", "Page"):
            self._call(f"{domain}.enable", session=True)
        self._call("Page.navigate", session=True, url=path.resolve().as_uri())
        while not self.loaded:
            self._read()

    def text(self) -> str:
        result = self._call("Runtime.evaluate", session=True, expression="document.body.innerText")
        return result["result"]["value"]

    def screenshot(self, path: Path, width: int = 1000) -> None:
        size = self._call("Page.getLayoutMetrics", session=True)["cssContentSize"]
        self._call(
            "Emulation.setDeviceMetricsOverride",
            session=True,
            width=width,
            height=int(size["height"]),
            deviceScaleFactor=1,
            mobile=False,
        )
        data = self._call("Page.captureScreenshot", session=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _call(self, method: str, session: bool = False, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        mine = self._count
        while mine not in self._answers:
            self._read()
        return self._answers.pop(mine)

    def _read(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0 or not select.select([self._in], [], [], left)[0]:
            raise TimeoutError("the browser did not answer")
        self._rest += os.read(self._in, 1 << 20)
        *messages, self._rest = self._rest.split(b"\0")
        for message in messages:
            self._take(json.loads(message))

    def _take(self, message: dict) -> None:
        if "id" in message:
            assert "error" not in message, message
            self._answers[message["id"]] = message["result"]
            return
        method, params = message["method"], message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(params))
        elif method == "Page.loadEventFired":
            self.loaded = True
