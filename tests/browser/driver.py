"""A real Chromium, spoken to by the WebDriver protocol: HTTP and JSON, nothing to install."""

import itertools
import json
import re
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from urllib.request import Request, urlopen

ARGUMENTS = [
    "--headless=new",
    "--disable-dev-shm-usage",  # containers have little of it
    "--disable-gpu",
    "--force-device-scale-factor=1",
    "--no-sandbox",  # tests may run as root, and look at our own pages only
]
LOGS = {"browser": "ALL", "performance": "ALL"}
PATIENCE = 60  # seconds
STARTED = re.compile(r"started successfully on port (\d+)")


def missing_program():
    """Name a program that is not installed, if one is not."""
    return next((name for name in ("chromedriver", "chromium") if not shutil.which(name)), None)


class Browser:
    """One window."""

    def __enter__(self):
        self._looks = itertools.count()
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self._address = f"http://127.0.0.1:{self._port()}/session"
            options = {"args": ARGUMENTS, "binary": shutil.which("chromium")}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": LOGS}
            session = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end()
            raise
        self._address += "/" + session["sessionId"]
        return self

    def __exit__(self, *_):
        try:
            self._send("DELETE", "")
        finally:
            self._end()

    def open(self, path):
        """Load a file, and forget what earlier pages wrote to the console."""
        self.console()
        self._send("POST", "/url", {"url": Path(path).resolve().as_uri()})

    def visit(self, address):
        """Load a page from a server, and forget what earlier pages wrote to the console."""
        self.console()
        self._send("POST", "/url", {"url": address})

    def script(self, code, *arguments):
        """Run a script in the page and return what it returns."""
        return self._send("POST", "/execute/sync", {"script": code, "args": list(arguments)})

    def press(self, key):
        """Press a key, as WebDriver writes it, on whatever has the focus."""
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        keyboard = {"type": "key", "id": "keyboard", "actions": strokes}
        self._send("POST", "/actions", {"actions": [keyboard]})

    def console(self):
        """Return what was written to the console since the last look: errors, refusals, logs.

        The browser hands entries over some time after they were written. So a mark of our own is
        written last, and everything up to it waited for.
        """
        mark = f"look number {next(self._looks)}."
        self.script("console.info(arguments[0])", mark)
        found = []
        end = time.monotonic() + PATIENCE
        while not any(mark in entry for entry in found):
            if time.monotonic() > end:
                raise TimeoutError(f"the console did not show what was written to it: {found}")
            entries = self._send("POST", "/se/log", {"type": "browser"})
            found += [f"{entry['level']}: {entry['message']}" for entry in entries]
        return [entry for entry in found if mark not in entry]

    def requests(self):
        """Return the addresses that were requested since the last look, of pages and workers."""
        entries = self._send("POST", "/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [each for each in events if each["method"] == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in sent]

    def emulate(self, *, width, height=900, scheme="light", media=""):
        """Pretend to be a screen of some size that likes one colour scheme."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def screenshot(self):
        """Return a PNG of the window."""
        return b64decode(self._send("GET", "/screenshot"))

    def pdf(self):
        """Return the page, printed."""
        return b64decode(self._send("POST", "/print", {}))

    def _devtools(self, command, parameters):
        self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _send(self, method, path, content=None):
        body = None if content is None else json.dumps(content).encode()
        request = Request(self._address + path, body, method=method)
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)["value"]

    def _port(self):
        for line in self._driver.stdout:
            found = STARTED.search(line)
            if found:
                return int(found[1])
        raise RuntimeError("chromedriver ended before it had started")

    def _end(self):
        self._driver.terminate()
        self._driver.wait(10)
        self._driver.stdout.close()
