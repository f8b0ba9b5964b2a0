"""Throughput and latency of the server against `EarlyExit.run` in a loop, on the same cores.

The server, its workers and the client run on this machine, so the client's share of the processor
is printed. Loop and server take turns, and the best of each counts. A client that is refused
because the queue is full tries again when the server says; its time starts at the first try.
Under load, requests come at random times at 70 % of the server's own throughput in the median turn
(at 70 % of the best turn, the server may be overloaded in the others), then at 70 % of the loop's.
The time of each counts from when it was due. "One client" sends one request at a time to the same
server.

    python benchmarks/serving.py                      # throughput, then latency at 70 % of it
    python benchmarks/serving.py --samples 8          # several images per request
    python benchmarks/serving.py --soak 600           # bad requests, and workers that are killed
"""

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftsure import demo
from swiftsure.demo.network import prepared
from swiftsure.serve.loading import demo_engine

EPSILON = 0.01
Images = NDArray[np.float32]


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--max-wait-ms", type=float, default=0.0)
    parser.add_argument("--clients", type=int, default=64, help="connections")
    parser.add_argument("--samples", type=int, default=1, help="images per request")
    parser.add_argument("--body", choices=["npy", "json"], default="npy")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0, help="seconds")
    given = parser.parse_args()
    images = prepared(demo.sample_images().images).numpy()
    if given.soak:
        soak(images, given.soak, given.workers)
    else:
        speed(images, given)


def speed(images: Images, given: argparse.Namespace) -> None:
    """Print throughput and latency."""
    loop_rates, single, server_rates, shares = [], [], [], []
    with running(given.workers, given.max_batch, given.max_wait_ms) as server:
        requests = [request(part, given.body) for part in parts(images, given.samples)]
        client(server.port, requests, given.clients, 1.0)  # warm
        for _ in range(given.turns):
            rate, loop_cpu = loop_rate(images, given.max_batch, given.seconds / 2)
            loop_rates.append(rate)
            before, front = server.cpu(), server.cpu(1)
            found = client(server.port, requests, given.clients, given.seconds)
            server_rates.append(found.rate * given.samples)
            used, front = server.cpu() - before, server.cpu(1) - front
            shares.append(found.cpu / (found.cpu + used))
            per = 1e6 * used / max(1, found.done * given.samples)
            print(
                f"loop {loop_rates[-1]:7,.0f} images/s, server {server_rates[-1]:7,.0f} images/s,"
                f" processor time per image: loop {1e6 * loop_cpu:.0f} µs, server {per:.0f} µs"
                f" ({100 * front / used:.0f} % of it outside the workers),"
                f" client {1e6 * found.cpu / max(1, found.done * given.samples):.0f} µs;"
                f" {found.refused} refused for now, {found.errors} errors",
                flush=True,
            )
            single.append(client(server.port, requests, 1, 1.0).quantile(0.5))
        rate, usual = max(server_rates), float(np.median(server_rates))
        print(f"loop, batches of {given.max_batch}: {max(loop_rates):,.0f} images/s (best)")
        print(f"server, {given.workers} workers: {rate:,.0f} images/s (best)")
        print(f"ratio: {rate / max(loop_rates):.2f} (target 0.85)")
        print(f"client's share of the processor time: {max(shares):.0%}")
        alone = min(single)
        print(f"one client, one request at a time: p50 {1e3 * alone:.1f} ms")
        for what, load in {"server": usual, "loop": max(loop_rates)}.items():
            best = float("inf")
            for _ in range(given.turns):
                at = 0.7 * load / given.samples
                found = client(server.port, requests, given.clients, given.seconds, at)
                best = min(best, found.quantile(0.99))
                print(
                    f"at 70 % of the {what}'s rate ({0.7 * load:,.0f} images/s;"
                    f" {found.rate * given.samples:,.0f} answered): p50"
                    f" {1e3 * found.quantile(0.5):.1f} ms, p99 {1e3 * found.quantile(0.99):.1f} ms"
                )
            print(f"p99 at that load is {best / alone:.1f} times one client's (target 4)")


def loop_rate(images: Images, batch: int, seconds: float) -> tuple[float, float]:
    """Return images per second of `EarlyExit.run`, with the best number of threads.

    Also returns the processor time of an image with one thread.
    """
    fast = demo_engine(EPSILON).fast  # type: ignore[attr-defined]
    batches = list(torch.from_numpy(images).split(batch))
    best, per_image = 0.0, float("inf")
    for threads in range(1, (os.cpu_count() or 1) + 1):
        torch.set_num_threads(threads)
        end, n, began = time.perf_counter() + seconds, 0, time.perf_counter()
        cpu = time.process_time()
        while time.perf_counter() < end:
            for out in fast.run(batches[:20]):
                n += len(out.exits)
        best = max(best, n / (time.perf_counter() - began))
        per_image = min(per_image, (time.process_time() - cpu) / n)
    return best, per_image


def parts(images: Images, samples: int) -> list[Images]:
    """Return the images of each request."""
    if samples == 1:
        return list(images[:512])
    return [images[k : k + samples] for k in range(0, 512, samples)]


def request(array: Any, body: str = "npy", kind: str | None = None) -> bytes:
    """Return an HTTP request."""
    if isinstance(array, bytes):
        content = array
    elif body == "npy":
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        content = file.getvalue()
    else:
        content = json.dumps({"inputs": array.tolist()}).encode()
    kind = kind or ("application/x-npy" if body == "npy" else "application/json")
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length:"
    return head.encode() + f" {len(content)}\r\n\r\n".encode() + content


# ------------------------------------------------------------------------------- the server


class running:  # noqa: N801 (reads as a statement)
    """A server in a process of its own."""

    def __init__(
        self, workers: int, max_batch: int, max_wait_ms: float, options: tuple[str, ...] = ()
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._state = tempfile.TemporaryDirectory()
        code = (
            "from swiftsure.serve import loading;"
            "loading.demo_engine.__defaults__ = (0.01,);"
            "from swiftsure.cli import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--demo", "--json", "--port", str(self.port),
             "--workers", str(workers), "--max-batch", str(max_batch),
             "--max-wait-ms", str(max_wait_ms), "--state", self._state.name, *options],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> "running":
        for _ in range(4000):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return self
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError("The server did not start.") from None
                time.sleep(0.05)
        self.process.kill()
        raise RuntimeError("The server did not start.")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self._state.cleanup()

    def pids(self) -> list[int]:
        """Return the processes of the server, workers included."""
        # Each thread lists its own children, and a lane's thread starts a worker again.
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [self.process.pid, *(int(pid) for task in tasks for pid in task.read_text().split())]

    def workers(self) -> list[int]:
        """Return the worker processes."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.pids()[1:]}
        return [pid for pid, command in commands.items() if b"spawn_main" in command]

    def cpu(self, first: int | None = None) -> float:
        """Return the processor time of its processes, or of the first of them."""
        found = 0.0
        for pid in self.pids()[:first]:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def memory(self) -> float:
        """Return the resident memory of all its processes, in MiB."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids())
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# ------------------------------------------------------------------------------- the client


class Found:
    """What a client measured."""

    def __init__(self, times: list[float], statuses: Counter[int], seconds: float, cpu: float):
        self.times = np.sort(times)
        self.statuses, self.cpu = statuses, cpu
        self.done = statuses[200]
        self.refused = statuses[429]
        self.errors = sum(statuses.values()) - self.done - self.refused
        self.rate = self.done / seconds

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.times, share)) if len(self.times) else float("nan")


def client(
    port: int, requests: list[bytes], n: int, seconds: float, rate: float | None = None
) -> Found:
    """Send requests from another process; as fast as answers come, or at random at a rate."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    work = context.Process(target=_client, args=(there, port, requests, n, seconds, rate))
    work.start()
    times, statuses, took, cpu = here.recv()
    work.join()
    return Found(times, statuses, took, cpu)


def _client(
    pipe: Any, port: int, requests: list[bytes], n: int, seconds: float, rate: float | None
) -> None:
    import uvloop

    cpu, began = time.process_time(), time.perf_counter()
    times, statuses = uvloop.run(_send_all(port, requests, n, seconds, rate))
    pipe.send((times, statuses, time.perf_counter() - began, time.process_time() - cpu))


async def _send_all(
    port: int, requests: list[bytes], n: int, seconds: float, rate: float | None
) -> tuple[list[float], Counter[int]]:
    times: list[float] = []
    statuses: Counter[int] = Counter()
    end, rng = time.perf_counter() + seconds, random.Random(0)
    jobs: asyncio.Queue[float] = asyncio.Queue()

    async def connection(k: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        number = k
        while time.perf_counter() < end:
            due = time.perf_counter() if rate is None else await jobs.get()
            if due < 0:
                break
            status, pause = 429, 0
            while status == 429:  # the queue is full: come again when the server says
                await asyncio.sleep(pause)
                writer.write(requests[number % len(requests)])
                status, pause = await _read(reader)
                statuses[status] += 1
            times.append(time.perf_counter() - due)
            number += n
        writer.close()

    async def arrivals(at: float) -> None:
        due = time.perf_counter()
        while due < end:
            due += rng.expovariate(at)
            if due > time.perf_counter():
                await asyncio.sleep(due - time.perf_counter())
            # Waiting for a free connection counts; timers may fire up to 0.5 ms early.
            jobs.put_nowait(min(due, time.perf_counter()))
        for _ in range(n):
            jobs.put_nowait(-1.0)

    async with asyncio.TaskGroup() as group:
        for k in range(n):
            group.create_task(connection(k))
        if rate is not None:
            group.create_task(arrivals(rate))
    return times, statuses


async def _read(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Read an answer; return its status, and after how many seconds to try again."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(_header(head, b"content-length"))
    return int(head[9:12]), _header(head, b"retry-after")


def _header(head: bytes, name: bytes) -> int:
    """Return a number in the head of an answer; 0 if it is not there."""
    _, found, after = head.partition(b"\r\n" + name + b": ")
    return int(after.partition(b"\r")[0]) if found else 0


# --------------------------------------------------------------------------------- the soak


def soak(images: Images, seconds: float, workers: int) -> None:
    """Send 1 % bad requests and kill workers; every request must get one answer."""
    good = [request(image) for image in images[:200]]
    nan = np.full_like(images[0], np.nan)
    bad = [
        request(nan),
        request(images[0][:2]),
        request(b"{", kind="application/json"),
        request(b"\x93NUMPY", kind="application/x-npy"),
        request(b"x", kind="text/plain"),
    ]
    rng = random.Random(0)
    requests = [rng.choice(bad) if k % 100 == 0 else rng.choice(good) for k in range(5000)]
    expected = sum(each in bad for each in requests) / len(requests)
    options = ("--audit", "0.02", "--timeout", "60")
    total: Counter[int] = Counter()
    memory: list[float] = []
    with running(workers, 16, 0.0, options) as server:
        total += client(server.port, requests, 16, 3.0).statuses
        end, killed, turn = time.monotonic() + seconds, 0, min(20.0, seconds / 6)
        while time.monotonic() < end:
            if turn * (killed + 1) < seconds / 2 or killed == 0:
                pid = rng.choice(server.workers())
                killer = multiprocessing.get_context("fork").Process(
                    target=_kill_later, args=(pid, turn / 2)
                )
                killer.start()
                killed += 1
            found = client(server.port, requests, 16, turn)
            total += found.statuses
            memory.append(server.memory())
            print(
                f"{dict(found.statuses)}, {found.rate:,.0f} answers/s, memory"
                f" {memory[-1]:,.0f} MiB",
                flush=True,
            )
    answered = sum(total.values())
    wrong = answered - total[200] - total[422] - total[415]
    print(f"{answered:,} requests, each answered once; {killed} workers killed")
    refused = (total[422] + total[415]) / answered
    print(f"bad requests: {expected:.2%} sent, {refused:.2%} refused; {wrong} others failed")
    print(f"statuses: {dict(total)}")
    half = len(memory) // 2
    print(f"memory: {min(memory[:half]):,.0f} to {max(memory[half:]):,.0f} MiB")


def _kill_later(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
