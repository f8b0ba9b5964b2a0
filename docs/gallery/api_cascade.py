"""Two language models behind an API, 500 labelled questions, and the bill.

The two models here are stand-ins on this machine, so that the program runs without a key. For real
ones, delete the server below and give each `Endpoint` its provider's address and your key's name:
`Endpoint("https://api.openai.com/v1", "gpt-4o-mini", per_million=(0.15, 0.60))`.
"""

import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import swiftsure as ss


class StandIn(BaseHTTPRequestHandler):
    """Adds numbers; the small model is often wrong about large ones, and then less sure."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        a, b = (int(word) for word in question.rstrip("?").split() if word.rstrip("?").isdigit())
        luck = random.Random(f"{body['model']} {question}")
        trouble = 0.02 if body["model"] == "large" else 0.6 * (a + b > 120)
        wrong = luck.random() < trouble
        p = min(max(luck.gauss(0.70 if wrong else 0.93, 0.08), 0.05), 1.0)
        text = str(a + b + wrong)
        token = {"token": text, "logprob": math.log(p), "top_logprobs": []}
        choice = {"message": {"content": text}, "logprobs": {"content": [token]}}
        usage = {"prompt_tokens": 60, "completion_tokens": 3}
        content = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
threading.Thread(target=server.serve_forever, args=(0.01,)).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
try:
    # 1. The two models, with their prices per million tokens. Keys come from the environment.
    small = ss.Endpoint(url, "small", key=None, per_million=(0.15, 0.60))
    large = ss.Endpoint(url, "large", key=None, per_million=(2.50, 10.00))
    cascade = ss.Cascade([small, large])

    # 2. Ask both about 500 questions. Every answer is kept in the folder as it arrives: after a
    #    crash, the same call goes on, and pays for no answer twice.
    draw = random.Random(0)
    pairs = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(700)]
    questions = [f"What is {a} + {b} ?" for a, b in pairs]
    labels = [str(a + b) for a, b in pairs]
    record = cascade.collect(questions[:500], labels[:500], folder="answers", concurrency=16)

    # 3. The cheapest threshold that loses at most 3 points of accuracy against the large model.
    policy = cascade.calibrate(record, epsilon=0.03)
    print(policy)

    # 4. Run it, and read the bill.
    out = cascade.run(policy, concurrency=16)(questions[500:])
    alone = record.full_costs["usd"].mean() * len(out.answers)
    right = sum(a == b for a, b in zip(out.answers, labels[500:], strict=True))
    print(f"{right} of {len(out.answers)} right; {(out.exits == 0).sum()} answered by small")
    print(f"the bill: ${out.cost['usd']:.4f}; large alone: ${alone:.4f}")
finally:
    server.shutdown()
    server.server_close()
