"""Latency that the proxy adds to an upstream, on the loopback, with many requests at once.

    python benchmarks/proxy.py --concurrent 200

The upstream is a process of its own that answers after a time that the request names, as a
language model would; the proxy is another one, and always keeps the small model's answer. All
clients send to the upstream itself in one round and to the proxy in the next, so both are measured
under the same arrivals. The report shows quantiles of the time beyond the named one without the
proxy, and how much larger they are with it.

| arrivals | each client |
|---|---|
| spread | sends one request after another, which take 0.5 to 1.5 times `--latency` seconds |
| burst | sends one request per round, one millisecond after the client before it |
| at-once | sends one request per round, at the same time as all others |

Client and upstream are bare protocols, not HTTP libraries, since they share the processor with the
proxy. The processor time of each process is printed as well.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

ARRIVALS = ("spread", "burst", "at-once")
MESSAGES = [{"role": "user", "content": "Is 7 odd? " + "Think about it. " * 40}]
NAMED = re.compile(rb'"user": ?"([0-9.]+)"')
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Messages(asyncio.Protocol):
    """Calls a function with each HTTP message that arrives."""

    def __init__(self, arrived: "Callable[[Messages, bytes, bytes], None]") -> None:
        self._arrived, self._rest = arrived, b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head, end, body = self._rest.partition(b"\r\n\r\n")
        found = LENGTH.search(head)
        if end and found is not None and len(body) >= int(found[1]):
            self._rest = b""
            self._arrived(self, head, body)


def serve_upstream(port: int, pipe: Connection) -> None:
    """Answer every request after the time that it names."""
    text = "It is odd."
    tokens = [{"token": word, "logprob": -0.01, "top_logprobs": []} for word in text.split()]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "logprobs": {"content": tokens},
    }
    usage = {"prompt_tokens": 200, "completion_tokens": 3, "total_tokens": 203}
    content = {"id": "1", "object": "chat.completion", "created": 0, "model": "small"}
    body = json.dumps({**content, "choices": [choice], "usage": usage}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    reply = head % len(body) + body

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def arrived(connection: Messages, _head: bytes, asked: bytes) -> None:
            found = NAMED.search(asked)
            assert found is not None
            loop.call_later(float(found[1]), connection.transport.write, reply)

        server = await loop.create_server(lambda: Messages(arrived), "127.0.0.1", port, backlog=999)
        await server.serve_forever()

    tell_time(pipe)
    uvloop.run(serve())


def serve_proxy(port: int, upstream: int, folder: str, pipe: Connection) -> None:
    """Serve a cascade of the upstream and itself."""
    from swiftsure import ExitRecord, calibrate
    from swiftsure.serve.lifecycle import listen, run
    from swiftsure.serve.proxy import ProxyConfig, create_proxy

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
        order=0,
        fingerprint=ProxyConfig.load(path)
        .model_copy(update={"policy": None})
        .cascade()
        .fingerprint,
    )
    policy = calibrate(record, risk="consistency", loss="exact_match", epsilon=0.05)
    policy.save(Path(folder) / "policy.json")
    tell_time(pipe)
    run(create_proxy(ProxyConfig.load(path)), listen("127.0.0.1", port))


def tell_time(pipe: Connection) -> None:
    """Answer each message on a pipe with the processor time that this process has used."""

    def tell() -> None:
        while pipe.recv():
            pipe.send(time.process_time())

    threading.Thread(target=tell, daemon=True).start()


class Client:
    """A connection on which one request is sent after another."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes]

    async def connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(
            lambda: Messages(self._arrived), "127.0.0.1", port
        )

    def close(self) -> None:
        self._connection.transport.close()

    def _arrived(self, _connection: Messages, head: bytes, body: bytes) -> None:
        if head.startswith(b"HTTP/1.1 200"):
            self._answer.set_result(body)
        else:
            self._answer.set_exception(RuntimeError(str(head + body)[:500]))

    async def ask(self, seconds: float) -> float:
        """Return the seconds until the answer, less those that the request names."""
        request = {"model": "cascade", "messages": MESSAGES, "user": f"{seconds:.6f}"}
        body = json.dumps(request).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._answer = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self._connection.transport.write(head + kind + body)
        await self._answer
        return time.perf_counter() - began - seconds


async def one_round(
    clients: list[Client], arrivals: str, latency: float, rng: np.random.Generator
) -> list[float]:
    """Let all clients send, and return the times of all requests."""
    loop = asyncio.get_running_loop()
    start, taken = loop.time() + 0.05, []

    async def client(k: int, each: Client) -> None:
        wait = {"spread": latency * k / len(clients), "burst": 0.001 * k, "at-once": 0.0}[arrivals]
        times = rng.uniform(0.5 * latency, 1.5 * latency, 5) if arrivals == "spread" else [latency]
        await asyncio.sleep(start + wait - loop.time())
        taken.extend([await each.ask(float(seconds)) for seconds in times])

    await asyncio.gather(*(client(k, each) for k, each in enumerate(clients)))
    return taken


async def measure(
    ports: dict[str, int],
    pipes: dict[str, Connection],
    arrivals: str,
    concurrent: int,
    latency: float,
    seconds: float,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the times of requests to each port, and the processor time per request by process."""
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {name: [] for name in ports}
    used: dict[str, float] = dict.fromkeys([*ports, "client"], 0.0)
    end = None
    while end is None or time.perf_counter() < end:
        for name, port in ports.items():
            # Made anew in each round: a server closes connections that are idle for some seconds.
            clients = [Client() for _ in range(concurrent)]
            await asyncio.gather(*(each.connect(port) for each in clients))
            before = processor_times(pipes)
            found = await one_round(clients, arrivals, latency, rng)
            for each in clients:
                each.close()
            if end is not None:  # the first round is a warm-up
                taken[name] += found
                for process, now in processor_times(pipes).items():
                    used[process] += now - before[process]
        end = end or time.perf_counter() + seconds
    n = {name: len(several) for name, several in taken.items()}
    every = sum(n.values())
    per_request = {"proxy": n["proxy"], "upstream": every, "client": every}
    return taken, {name: used[name] / per_request[name] for name in used}


def processor_times(pipes: dict[str, Connection]) -> dict[str, float]:
    """Return the processor time that each process has used."""
    for pipe in pipes.values():
        pipe.send(True)
    return {name: pipe.recv() for name, pipe in pipes.items()} | {"client": time.process_time()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrivals", nargs="+", choices=ARRIVALS, default=ARRIVALS)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    ports = {"upstream": 18431, "proxy": 18432}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in ports), strict=True)
        processes = [
            multiprocessing.Process(target=serve_upstream, args=(ports["upstream"], theirs[0])),
            multiprocessing.Process(
                target=serve_proxy, args=(ports["proxy"], ports["upstream"], folder, theirs[1])
            ),
        ]
        for process in processes:
            process.start()
        try:
            asyncio.run(_wait(tuple(ports.values())))
            for arrivals in arguments.arrivals:
                found, used = uvloop.run(
                    measure(
                        ports,
                        dict(zip(ports, ours, strict=True)),
                        arrivals,
                        arguments.concurrent,
                        arguments.latency,
                        arguments.seconds,
                    )
                )
                report(arrivals, found, used)
        finally:
            for process in processes:
                if process.pid is not None:
                    os.kill(process.pid, 15)
                process.join()


def report(arrivals: str, taken: dict[str, list[float]], used: dict[str, float]) -> None:
    """Print the quantiles and the processor times."""
    print(f"{arrivals}: {len(taken['proxy']):,} requests through the proxy")
    for q in (50, 90, 99):
        alone, through = (1000 * np.percentile(taken[name], q) for name in ("upstream", "proxy"))
        print(f"  p{q}: {alone:.1f} ms alone, {through - alone:+.1f} ms through the proxy")
    times = ", ".join(f"{name} {1000 * each:.2f} ms" for name, each in used.items())
    print(f"  processor time per request: {times}", flush=True)


async def _wait(ports: tuple[int, ...]) -> None:
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
