"""The certified network in a browser: its exits are Python's, and it asks no other host."""

import base64
import re
import sys
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if any(find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript", "torch")):
    pytest.skip("the page is built with the extra `export`", allow_module_level=True)

from swiftsure import demo
from swiftsure.demo.network import prepared, trained_exits
from swiftsure.torch import EarlyExit
from tests.browser.driver import PATIENCE

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples" / "browser"

CLASSIFY = """
const [images, size] = arguments;
const pixels = Uint8Array.from(atob(images), (letter) => letter.charCodeAt(0));
const { load } = await import("/network.js");
const network = await load();
const found = [];
for (let k = 0; k < pixels.length; k += size) {
  found.push(await network.classify(pixels.subarray(k, k + size)));
}
return found;
"""
SHOWN = """
const text = (id) => document.getElementById(id).textContent;
return {
  ready: document.body.dataset.ready, fault: text("fault"), promise: text("promise"),
  answer: text("answer"), saved: text("saved"),
  tally: Object.fromEntries([...document.querySelectorAll("#tally tr")]
    .map((row) => [row.cells[0].textContent, row.cells[1].textContent])),
  left: document.querySelectorAll('#exits [data-state="left"]').length,
  wide: document.documentElement.scrollWidth > innerWidth,
};
"""
DRAW = """
const canvas = document.getElementById("drawing");
canvas.setPointerCapture = () => {};
const at = (kind, x, y) => canvas.dispatchEvent(new PointerEvent(kind, {
  bubbles: true, buttons: kind === "pointerup" ? 0 : 1, pointerId: 1,
  clientX: canvas.getBoundingClientRect().x + x, clientY: canvas.getBoundingClientRect().y + y,
}));
at("pointerdown", 112, 20);
for (let y = 20; y <= 200; y += 10) at("pointermove", 112, y);
at("pointerup", 112, 200);
"""
OPEN_FILE = """
const canvas = new OffscreenCanvas(60, 80);
const drawing = canvas.getContext("2d");
drawing.fillStyle = "#fff";
drawing.fillRect(0, 0, 60, 80);
drawing.fillStyle = "#222";
drawing.fillRect(15, 20, 30, 50);
const transfer = new DataTransfer();
transfer.items.add(new File([await canvas.convertToBlob()], "photo.png", { type: "image/png" }));
document.getElementById("file").files = transfer.files;
document.getElementById("file").dispatchEvent(new Event("change"));
"""


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(FOLDER))
    try:
        import page
    finally:
        sys.path.pop(0)
    if not page.RUNTIME.is_dir():
        pytest.skip("onnxruntime-web is not installed (run `npm install` in examples/browser)")
    return page


@pytest.fixture(scope="module")
def site(page, tmp_path_factory):
    """The policy, and the folder of the page."""
    folder = tmp_path_factory.mktemp("page") / "site"
    return page.build(folder), folder


@contextmanager
def serving(page, folder):
    with page.server(folder, 0) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def address(page, site):
    with serving(page, site[1]) as found:
        yield found


def thousand_images():
    """The sample images, some of them mirrored, and some darker and noisy."""
    images = demo.sample_images().images[:, 0]
    noise = np.random.default_rng(0).normal(scale=25, size=(200, *images.shape[1:]))
    noisy = (0.7 * images[:200] + noise).clip(0, 255).astype(np.uint8)
    return np.concatenate([images, images[:, :, ::-1], noisy])


def wait_for(browser, reached):
    end = time.monotonic() + PATIENCE
    while not reached(found := browser.script(SHOWN)):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def test_a_thousand_images_exit_where_python_says(browser, site, address):
    policy, _ = site
    images = thousand_images()
    fast = EarlyExit(trained_exits(), policy)
    out = fast(prepared(np.repeat(images[:, None], 3, axis=1)))
    browser.visit(address)
    wait_for(browser, lambda found: found["ready"])
    sent = base64.b64encode(images.tobytes()).decode()
    found = browser.script(f"return (async (...arguments) => {{{CLASSIFY}}})(...arguments)",
                           sent, images[0].size)  # fmt: skip
    exits = np.array([each["exit"] for each in found])
    assert len(exits) == 1000
    assert len(set(exits.tolist())) == 4
    np.testing.assert_array_equal(exits, out.exits)
    np.testing.assert_array_equal([each["prediction"] for each in found], out.predictions)
    early = np.flatnonzero(exits < 3)
    confidences = np.array([found[k]["confidence"] for k in early])
    np.testing.assert_allclose(confidences, out.confidences[early, exits[early]], atol=1e-5)
    assert all(found[k]["confidence"] is None for k in np.flatnonzero(exits == 3))


def test_picked_drawn_and_opened_images(browser, site, address):
    browser.emulate(width=390)
    browser.requests()
    browser.visit(address)
    found = wait_for(browser, lambda found: found["tally"].get("images") == "1")
    assert found["promise"] == str(site[0]).splitlines()[0]
    browser.script("document.querySelectorAll('#images button')[7].click()")
    found = wait_for(browser, lambda found: found["tally"]["images"] == "2")
    assert found["left"] == 1
    assert re.fullmatch(r"[a-zA-Z/ -]+, by exit [1-4]\. Confidence: .+\.", found["answer"])
    assert re.fullmatch(r"-?[\d.]+ %", found["saved"])
    assert found["tally"]["FLOPs saved"].endswith("%")
    browser.script(DRAW)
    wait_for(browser, lambda found: found["tally"]["images"] == "3")
    browser.script(f"return (async () => {{{OPEN_FILE}}})()")
    found = wait_for(browser, lambda found: found["tally"]["images"] == "4")
    assert found["fault"] == ""
    assert not found["wide"]
    browser.script("document.getElementById('all').click()")
    wait_for(browser, lambda found: int(found["tally"]["images"]) > 6)  # it does not freeze
    assert browser.console() == []
    requested = browser.requests()
    assert f"{address}/early.onnx" in requested
    assert [each for each in requested if not each.startswith((address, "data:", "blob:"))] == []


def test_a_page_that_lacks_its_network_says_so(browser, page, site, tmp_path):
    for name in ("index.html", "page.js", "page.css", "network.js", *page.RUNTIME_FILES):
        (tmp_path / name).symlink_to(site[1] / name)
    with serving(page, tmp_path) as address:
        browser.visit(address)
        found = wait_for(browser, lambda found: found["fault"])
    assert found["fault"].startswith("The page does not work: ")
