"""Questions of bank customers with their intents: Banking77 (PolyAI, CC BY 4.0)."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["PARTS", "Questions", "banking77", "encoded", "in_batches"]

PARTS = ("train", "test")


class Questions(NamedTuple):
    """Texts and the numbers of their intents."""

    texts: list[str]
    labels: Tensor

    def rows(self, index: Tensor) -> "Questions":
        """Return some of the questions."""
        return Questions([self.texts[i] for i in index.tolist()], self.labels[index])


def banking77(folder: Path, part: str) -> Questions:
    """Read PART.csv.gz (or unpacked), `text,category`, and categories.json.

    The file is sorted by intent: draw from it at random.
    """
    packed = folder / f"{part}.csv.gz"
    if packed.exists():
        text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    else:
        text = (folder / f"{part}.csv").read_text(encoding="utf-8")
    names = json.loads((folder / "categories.json").read_text())
    rows = list(csv.DictReader(text.splitlines(keepends=True)))
    labels = [names.index(row["category"]) for row in rows]
    return Questions([row["text"].strip() for row in rows], torch.tensor(labels))


def encoded(tokenizer: Any, texts: list[str], length: int) -> dict[str, Tensor]:
    """Return a batch of texts as the network takes it, cut to `length` tokens."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def in_batches(
    tokenizer: Any, questions: Questions, size: int, length: int, device: str = "cpu"
) -> Iterator[dict[str, Tensor]]:
    """Yield batches with labels, in the given order."""
    for start in range(0, len(questions.texts), size):
        batch = encoded(tokenizer, questions.texts[start : start + size], length)
        batch["labels"] = questions.labels[start : start + size]
        yield {name: value.to(device) for name, value in batch.items()}
