"""A small server on the loopback that speaks OpenAI's protocol, and fails as it is told to."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server:
    """Answers "even" or "odd" to a number; the small model is wrong about multiples of 10."""

    def __init__(self):
        self.requests, self.faults, self.headers = [], [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, body))
                outer.headers.append(dict(self.headers))
                fault = outer.faults.pop(0) if outer.faults else None
                if fault is None:
                    self.reply(200, json.dumps(reply(self.path, body)).encode())
                elif fault == "cut":
                    self.close_connection = True
                    self.connection.close()
                else:
                    status, headers, content = fault
                    self.reply(status, content, headers)

            def reply(self, status, content, headers=()):
                self.send_response(status)
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def reply(path, body):
    chat = path.endswith("chat/completions")
    text = body["messages"][-1]["content"] if chat else body["prompt"]
    number = int("".join(c for c in text if c.isdigit()))
    answer, p = ["even", "odd"][number % 2], 0.95
    if body["model"] == "small" and number % 10 == 0:
        answer, p = "odd", 0.6
    usage = {"prompt_tokens": 20, "completion_tokens": 2}
    if chat:
        top = [{"token": answer, "logprob": math.log(p)}, {"token": "x", "logprob": math.log(0.01)}]
        token = {"token": answer, "logprob": math.log(p), "top_logprobs": top}
        choice = {"message": {"content": answer}, "logprobs": {"content": [token, token]}}
    else:
        logs = {
            "tokens": [answer],
            "token_logprobs": [math.log(p)],
            "top_logprobs": [{answer: -0.1}],
        }
        choice = {"text": answer, "logprobs": logs}
    return {"choices": [choice], "usage": usage, "model": body["model"]}


@pytest.fixture
def server():
    running = Server()
    yield running
    running.stop()
