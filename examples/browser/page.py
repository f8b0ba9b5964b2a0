"""Run the certified demo network in a browser, with ONNX Runtime's WebAssembly.

    make browser

calibrates the network, writes it as one ONNX file that exits by itself, and serves the page on
this machine. The page asks no other host for anything.
"""

import argparse
import json
import shutil
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import swiftsure as ss
from swiftsure import demo, onnx
from swiftsure.demo.network import prepared, trained_exits

HERE = Path(__file__).parent
SITE = HERE / "site"
RUNTIME = HERE / "node_modules" / "onnxruntime-web" / "dist"
RUNTIME_FILES = (
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
)
EPSILON = 0.01


def build(site: Path) -> ss.Policy:
    """Write the page, the networks, the images and ONNX Runtime to a folder."""
    policy = ss.calibrate(demo.calibration_record(), loss="zero_one", epsilon=EPSILON)
    images = demo.sample_images().images
    site.mkdir(parents=True, exist_ok=True)
    for file in ("index.html", "network.js", "page.css", "page.js"):
        shutil.copy(HERE / file, site)
    for file in RUNTIME_FILES:
        shutil.copy(RUNTIME / file, site)
    with tempfile.TemporaryDirectory() as folder:
        inputs = prepared(images[:64])
        onnx.export(trained_exits(), policy, folder, example=inputs)
        onnx.write_single_file(folder, site / "early.onnx", examples=inputs.numpy())
        onnx.write_single_file(folder, site / "full.onnx", full=True)
    (site / "images.bin").write_bytes(images[:, 0].tobytes())  # the three channels are equal
    described = demo.description()
    facts = {
        "promise": str(policy),
        "classes": described["classes"],
        "mean": described["mean"],
        "std": described["std"],
        "flops": described["flops"],
        "full_flops": float(demo.record().full_costs.get("flops", described["flops"][-1])),
    }
    (site / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return policy


class Handler(SimpleHTTPRequestHandler):
    """Serves files that may load files of this host alone."""

    extensions_map = {  # noqa: RUF012 (as the base class has it)
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        """Send the rules of the page with every answer."""
        rules = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; img-src 'self' data:"
        self.send_header("Content-Security-Policy", rules)
        # A page that shares nothing with others gets a clock of 5 instead of 100 microseconds.
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Write no line for each file."""


def server(site: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of a folder on this machine; port 0 takes any that is free."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(site)))


def main() -> None:
    """Build the page and serve it until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8080)
    port = parser.parse_args().port
    if not RUNTIME.is_dir():
        raise SystemExit(f"ONNX Runtime is missing: run `npm install` in {HERE}.")
    print(build(SITE))
    with server(SITE, port) as running:
        print(f"Serving on http://127.0.0.1:{running.server_port} until Ctrl-C")
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
