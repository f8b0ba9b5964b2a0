"""Tokens per second of a text server with several clients, against one `generate` after another.

The library's translator under its certified policy. Server and clients share this machine's cores.
The ways take turns, and the best turn of each counts. Served texts must be those of `generate`.

    python benchmarks/text_serving.py --clients 8
"""

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

import swiftsure as ss
from swiftsure.serve import create_app, engine_of, start
from swiftsure.text import CalmModel
from swiftsure_zoo.records import CALM, TRANSLATOR

WHO = ("Ein Mann", "Eine Frau in einem blauen Kleid", "Ein kleines Kind", "Ein alter Mann")
DOES = ("liest auf einer Bank ein Buch", "spielt mit einem Ball", "wartet auf den Bus", "lacht")
WHERE = ("im Park", "am Strand", "vor einem Haus", "im Regen")
EPSILON = 0.02
TARGET = 3.0


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    logging.disable_progress_bar()
    record = ss.ThresholdRecord.load(CALM / "t5_multi30k_saturation.parquet")
    policy = ss.calibrate(record, risk="gap", loss="bleu", epsilon=EPSILON)
    words = AutoTokenizer.from_pretrained(TRANSLATOR)
    model = AutoModelForSeq2SeqLM.from_pretrained(TRANSLATOR, dtype=torch.float32).eval()
    fast = CalmModel(model.to(given.device), policy)
    limit = policy.settings["generation"]
    sentences = (f"{who} {does} {where}." for who, does, where in product(WHO, DOES, WHERE))
    texts = list(islice(sentences, given.texts))

    def encoded(text: str) -> dict[str, torch.Tensor]:
        return dict(words(text, return_tensors="pt").to(given.device))

    def early(text: str) -> list[int]:
        return fast.generate(**encoded(text)).sequences[0, 1:].tolist()

    def in_full(text: str) -> list[int]:
        return model.generate(**encoded(text), **limit, do_sample=False)[0, 1:].tolist()

    with start(create_app(engine_of(fast, words))) as address:

        def served(text: str) -> tuple[str, int]:
            body = json.dumps({"prompt": text, "model": "text"}).encode()
            kind = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/completions", body, kind)
            with urllib.request.urlopen(request) as response:
                found = json.load(response)
            return found["choices"][0]["text"], found["usage"]["completion_tokens"]

        best = dict.fromkeys(("early", "full", "served", "one client"), 0.0)
        for turn in range(given.turns + 1):  # the first warms up
            alone, rates = [], {}
            for name, way in (("early", early), ("full", in_full)):
                began = time.perf_counter()
                found = [way(text) for text in texts]
                rates[name] = sum(map(len, found)) / (time.perf_counter() - began)
                alone = alone or found
            for name, n in (("served", given.clients), ("one client", 1)):
                began = time.perf_counter()
                with ThreadPoolExecutor(n) as clients:
                    answers = list(clients.map(served, texts))
                rates[name] = sum(n for _, n in answers) / (time.perf_counter() - began)
                decoded = [words.decode(each, skip_special_tokens=True) for each in alone]
                assert [text for text, _ in answers] == decoded, "served texts must be the same"
            if turn:
                best = {name: max(best[name], rates[name]) for name in best}

    for name, rate in best.items():
        print(f"{name:12} {rate:8.0f} tokens per second")
    for name in ("early", "full"):
        found = best["served"] / best[name]
        print(
            f"{given.clients} clients against `generate` ({name}), one after another:"
            f" {found:.2f} times (target {TARGET:g})"
        )


if __name__ == "__main__":
    main()
