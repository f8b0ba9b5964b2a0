"""Latency that the proxy adds to an upstream, on the loopback, with many requests at once.

    python benchmarks/proxy.py --concurrent 200

The upstream is a process of its own that answers after a time that the client draws, `--latency`
seconds on average, as a language model would. Each client sends one request after another, to the
upstream itself and to the proxy in turn, so both are measured under the same load. What is
reported is the time beyond the drawn one. The proxy always keeps the small model's answer.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import uvicorn

MESSAGES = [{"role": "user", "content": "Is 7 odd? " + "Think about it. " * 40}]


def serve_upstream(port: int) -> None:
    """Answer every request after the time that it asks for."""
    text = "It is odd."
    tokens = [{"token": word, "logprob": -0.01, "top_logprobs": []} for word in text.split()]
    body = json.dumps(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "small",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                    "logprobs": {"content": tokens},
                }
            ],
            "usage": {"prompt_tokens": 200, "completion_tokens": 3, "total_tokens": 203},
        }
    ).encode()

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        if scope["type"] != "http":
            return
        parts = [message := await receive()]
        while message.get("more_body"):
            parts.append(message := await receive())
        asked = json.loads(b"".join(each["body"] for each in parts))
        await asyncio.sleep(float(asked["user"]))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, port=port, log_level="error", lifespan="off")


def serve_proxy(
    port: int, upstream: int, folder: str, used: "multiprocessing.Queue[float]"
) -> None:
    """Serve a cascade of the upstream and itself."""
    from swiftsure import ExitRecord, calibrate
    from swiftsure.serving.proxy import ProxyConfig, create_proxy
    from swiftsure.serving.running import run

    model = f'[[models]]\nbase_url = "http://127.0.0.1:{upstream}/v1"\nlogprobs = 5\n'
    path = Path(folder) / "cascade.toml"
    names = ("small", "large")
    tables = "".join(f'{model}model = "{name}"\n' for name in names)
    path.write_text(f'policy = "policy.json"\n{tables}')
    zeros = np.zeros((1000, 2))
    record = ExitRecord(
        {"confidence": np.full((1000, 1), 0.9)},
        inconsistencies={"exact_match": zeros},
        costs={"usd": np.asarray([1.0, 2.0])},
        fingerprint=ProxyConfig.load(path)
        .model_copy(update={"policy": None})
        .cascade()
        .fingerprint,
    )
    policy = calibrate(record, risk="consistency", loss="exact_match", epsilon=0.05, seed=0)
    policy.save(Path(folder) / "policy.json")
    run(create_proxy(ProxyConfig.load(path)), "127.0.0.1", port)
    used.put(resource.getrusage(resource.RUSAGE_SELF).ru_utime)


async def measure(
    port: int, proxy: int, concurrent: int, latency: float, seconds: float
) -> dict[str, np.ndarray]:
    """Return the seconds of each request beyond the drawn time, to the upstream and the proxy."""
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {"upstream": [], "proxy": []}
    places = {"upstream": port, "proxy": proxy}
    end = time.perf_counter() + seconds

    async def client(session: aiohttp.ClientSession, k: int) -> None:
        await asyncio.sleep(latency * k / concurrent)
        while time.perf_counter() < end:
            for name, place in places.items():
                drawn = float(rng.uniform(0.5 * latency, 1.5 * latency))
                body = {"model": "cascade", "messages": MESSAGES, "user": f"{drawn:.6f}"}
                began = time.perf_counter()
                url = f"http://127.0.0.1:{place}/v1/chat/completions"
                async with session.post(url, json=body) as response:
                    content = await response.read()
                if response.status != 200:
                    raise RuntimeError(content[:300])
                taken[name].append(time.perf_counter() - began - drawn)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session, k) for k in range(concurrent)))
    return {name: np.asarray(each[concurrent:]) for name, each in taken.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    ports = 18431, 18432
    used: multiprocessing.Queue[float] = multiprocessing.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            multiprocessing.Process(target=serve_upstream, args=(ports[0],)),
            multiprocessing.Process(target=serve_proxy, args=(ports[1], ports[0], folder, used)),
        ]
        for process in processes:
            process.start()
        try:
            asyncio.run(_wait(ports))
            found = asyncio.run(
                measure(*ports, arguments.concurrent, arguments.latency, arguments.seconds)
            )
        finally:
            for process in processes:
                if process.pid is not None:
                    os.kill(process.pid, 15)
                process.join()
    n = len(found["proxy"])
    print(f"{n:,} requests through the proxy, {n / arguments.seconds:.0f} per second")
    for q in (50, 90, 99):
        alone, through = (1000 * np.percentile(found[name], q) for name in ("upstream", "proxy"))
        print(f"p{q}: {alone:.1f} ms alone, {through - alone:+.1f} ms through the proxy")
    if not used.empty():
        print(f"CPU time of the proxy: {1000 * used.get() / n:.2f} ms per request, start included")


async def _wait(ports: tuple[int, int]) -> None:
    for port in ports:
        for _ in range(300):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
