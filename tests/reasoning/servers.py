"""A small server that thinks: a word at a time, with answers on the way, and faults."""

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ASK = "**Final answer:** \\boxed{"


def need_of(number):
    """Words of thinking after which the server knows the answer; it thinks on to twice that."""
    return 10 * (3 + number % 17)


class Server:
    """Thinks about "q17" for 2 * need words, and answers "even" or "odd".

    `faults` holds what happens to the next requests: "cut" ends a stream after two words, "error"
    answers with status 500, a number is a status. `requests` are the bodies that came.
    """

    def __init__(self, logprobs=True):
        self.requests, self.faults, self.logprobs = [], [], logprobs
        self.written = []
        self.final = "The answer is \\boxed{%s}."
        self.gate = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                fault = outer.faults.pop(0) if outer.faults else None
                if "messages" in body and fault is None:
                    self.reply(200, json.dumps(outer.chat(body)).encode())
                elif isinstance(fault, int):
                    self.reply(fault, b"{}")
                elif body.get("stream"):
                    self.stream(body, fault)
                else:
                    self.reply(200, json.dumps(outer.probe(body)).encode())

            def stream(self, body, fault):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                try:
                    for k, (word, finish) in enumerate(outer.words(body)):
                        if fault == "cut" and k == 2:
                            return
                        choice = {"index": 0, "text": word, "finish_reason": finish}
                        self.event({"choices": [choice]})
                        outer.written.append(word)
                        if outer.gate is not None and k == 130:
                            outer.gate.wait(5)
                    self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    outer.written.append("cancelled")

            def event(self, content):
                self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
                self.wfile.flush()

            def reply(self, status, content):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self):
        if self.gate is not None:
            self.gate.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def chat(self, body):
        """Think to the end, and show the answer alone."""
        number = int(re.search(r"q(\d+)", body["messages"][-1]["content"])[1])
        message = {"role": "assistant", "content": self.final % right(number)}
        usage = {"prompt_tokens": 10, "completion_tokens": 2 * need_of(number)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "model": body["model"], "choices": [choice], "usage": usage}

    def words(self, body):
        """Yield the words that continue a prompt."""
        number, thought, said = parts(body["prompt"])
        whole = [f" w{k}" for k in range(2 * need_of(number))]
        whole += ["\n</think>", "\n\n", *(f"{self.final % right(number)}".split(" "))]
        done = len(re.findall(r"w\d+", thought))
        if said is not None:
            done = len(whole) - 1
        left = whole[done : done + body["max_tokens"]]
        for word in left:
            yield word if word[0] in " \n" else f" {word}", None
        yield "", "stop" if done + len(left) == len(whole) else "length"

    def probe(self, body):
        """Answer on the way: right once it has thought long enough."""
        assert body["prompt"].endswith(ASK), body["prompt"][-80:]
        number, thought, _ = parts(body["prompt"])
        words = len(re.findall(r"w\d+", thought))
        sure = 0.98 if words >= need_of(number) else 0.4
        answer = right(number) if words >= need_of(number) else "unknown"
        logprobs = None
        if self.logprobs:
            logprobs = {
                "tokens": [answer],
                "token_logprobs": [math.log(sure)],
                "top_logprobs": [{answer: math.log(sure), "x": math.log(1 - sure)}],
            }
        return {
            "choices": [{"text": answer, "logprobs": logprobs, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10 + words, "completion_tokens": 2},
        }


def parts(prompt):
    """Return the number of the question, the thinking, and what was said after it."""
    number = int(re.search(r"q(\d+)", prompt)[1])
    thought, mark, said = prompt.partition("<think>")[2].partition("</think>")
    return number, thought, said if mark else None


def right(number):
    return ["even", "odd"][number % 2]
