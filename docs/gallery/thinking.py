"""A reasoning model that stops thinking once its answer is safe.

The model here is a stand-in on this machine. For a real one, delete the server below and name
yours: `Endpoint("http://localhost:8000/v1", "Qwen/Qwen3-8B", key=None)` for vLLM or llama.cpp.
"""

import json
import math
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import swiftsure as ss
from swiftsure.reasoning import Reasoner, Thinker, collect_traces


class StandIn(BaseHTTPRequestHandler):
    """Adds numbers: it knows the sum long before it stops thinking about it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)", prompt)[0])
        knows = 150 + 6 * (a + b) % 500
        thought = prompt.partition("<think>")[2].partition("</think>")[0]
        if body.get("stream"):
            words = ["hmm "] * (2 * knows - thought.count("hmm")) + [
                "</think>",
                f"The answer is {a + b}",
            ]
            events = [{"choices": [{"text": word, "finish_reason": None}]} for word in words]
            events.append({"choices": [{"text": "", "finish_reason": "stop"}]})
            content = "".join(f"data: {json.dumps(each)}\n\n" for each in events).encode()
        else:  # asked on the way
            early = thought.count("hmm") < knows
            p = random.Random(prompt).uniform(0.2, 0.7) if early else 0.97
            text = str(a + b + early)
            log = {"tokens": [text], "token_logprobs": [math.log(p)], "top_logprobs": None}
            usage = {"prompt_tokens": 0, "completion_tokens": 3}
            content = json.dumps(
                {"choices": [{"text": text, "logprobs": log}], "usage": usage}
            ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
threading.Thread(target=server.serve_forever, args=(0.01,)).start()
try:
    # 1. The model. Its family says how it is asked to think, and is found by its name.
    url = f"http://127.0.0.1:{server.server_port}/v1"
    model = Reasoner(ss.Endpoint(url, "Qwen/Qwen3-8B", key=None))

    # 2. Let it think about 150 questions, and ask every 100 tokens what it would answer. All that
    #    arrives is kept in the folder: the same call goes on where it was, and pays nothing twice.
    draw = random.Random(0)
    pairs = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(170)]
    questions = [f"What is {a} + {b} ?" for a, b in pairs]
    labels = [str(a + b) for a, b in pairs]
    traces = collect_traces(model, questions[:150], labels[:150], checkpoints=100, folder="traces")

    # 3. The earliest stop that loses at most 3 points of accuracy against thinking to the end.
    policy = ss.calibrate(traces.exits(100), loss="zero_one", epsilon=0.03, score="confidence")
    print(policy)

    # 4. Run it: the stream is cancelled as soon as the answer is safe.
    thinker = Thinker(model, policy)
    thoughts = thinker.answers(questions[150:])
    right = sum(each.answer == y for each, y in zip(thoughts, labels[150:], strict=True))
    tokens = thinker.spent["thinking"] / len(thoughts)
    probes = thinker.spent["probes"] / len(thoughts)
    print(f"{right} of {len(thoughts)} right")
    print(f"tokens per question: {tokens:.0f} and {probes:.0f} to ask; all: {thinker.usual:.0f}")
finally:
    server.shutdown()
    server.server_close()
