"""Threshold records of the trained translation model, from the root of the repository:
`python -m experiments.calm.records --data FOLDER`.

Sweeps the thresholds of each confidence measure over all test sentences of Multi30k (2016, 2017 and
MSCOCO), from the model in experiments/translation/results/t5_multi30k. The meta-classifier is
trained on the validation part. Writes NAME_SCORE.parquet, and scores.json with the corpus BLEU of
the full model on each test part.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from experiments import commands
from experiments.translation.data import Pairs, multi30k
from experiments.translation.train import HERE as TRANSLATION
from experiments.translation.train import translations
from swiftsure import RunOptions
from swiftsure.text import (
    CalmModel,
    CalmRule,
    MetaClassifier,
    Texts,
    TokenScore,
    learn_token_score,
    sweep,
    train_meta,
)

HERE = Path(__file__).parent
NAME = "t5_multi30k"
PARTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
GENERATION = {"max_new_tokens": 64}

PROBABILITIES = np.linspace(0.98, 0.0, 25).round(3)
MEASURES = {
    "softmax": (CalmRule(), PROBABILITIES),
    "shortlist": (CalmRule(shortlist=64), PROBABILITIES),
    "saturation": (CalmRule(score="saturation"), (1 - np.geomspace(0.002, 0.6, 25)).round(4)),
    "meta": (CalmRule(score="meta"), np.linspace(0.98, 0.02, 25).round(3)),
    "learned": (CalmRule(score="learned"), np.linspace(0.98, 0.02, 25).round(3)),
    "softmax-second": (CalmRule(look_at=(1,)), PROBABILITIES),
    "meta-second": (CalmRule(score="meta", look_at=(1,)), np.linspace(0.98, 0.0, 25).round(3)),
}
"""Rules and their thresholds, safest first; the full model comes before them.

"second" looks after the second block only. That block was chosen on the validation part.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=TRANSLATION / "results" / NAME)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--scores", nargs="+", default=list(MEASURES))
    parser.add_argument("--sentences", type=int, help="of each part; all by default")
    parser.add_argument("--batch", type=int, default=256)
    arguments = parser.parse_args()
    device = commands.device()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = model.to(device).eval()
    arguments.output.mkdir(parents=True, exist_ok=True)

    folder, kept = arguments.data / "multi30k", slice(arguments.sentences)
    tests = {part: multi30k(folder, part) for part in PARTS}
    tests = {part: Pairs(pairs.german[kept], pairs.english[kept]) for part, pairs in tests.items()}
    scores = {}
    for part, pairs in tests.items():
        said = translations(model, tokenizer, pairs.german)
        scores[part] = round(sacrebleu.corpus_bleu(said, [pairs.english]).score, 2)
    (arguments.output / "scores.json").write_text(json.dumps({"bleu": scores}, indent=2) + "\n")
    print(f"BLEU of the full model: {scores}", flush=True)

    trained_for: dict[str, MetaClassifier | TokenScore] = {}
    if "learned" in arguments.scores:
        pilot = Texts(multi30k(folder, "val").german[kept], tokenizer)
        trained_for["learned"] = learn_token_score(
            model, pilot, **GENERATION, batch_size=arguments.batch
        )
    if any(MEASURES[each][0].score == "meta" for each in arguments.scores):
        trained = arguments.output / f"{NAME}_meta.safetensors"
        if (arguments.output / f"{NAME}_meta_shards").exists():  # a sweep to continue
            trained_for["meta"] = MetaClassifier.load(trained).to(device)
        else:
            held = multi30k(folder, "val")
            classifier = train_meta(
                model,
                Texts(held.german[kept], tokenizer),
                **GENERATION,
                batch_size=arguments.batch,
            )
            classifier.save(trained)
            trained_for["meta"] = classifier
    texts = [text for pairs in tests.values() for text in pairs.german]
    references = [text for pairs in tests.values() for text in pairs.english]
    ids = [f"{part}_{i}" for part, pairs in tests.items() for i in range(len(pairs.german))]
    for score in arguments.scores:
        rule, thresholds = MEASURES[score]
        record = sweep(
            CalmModel(model, rule, classifier=trained_for.get(rule.score)),
            Texts(texts, tokenizer, references, ids),
            thresholds=thresholds,
            losses=["bleu", "rouge_l"],
            generation=GENERATION,
            batch_size=arguments.batch,
            run=RunOptions(shards=arguments.output / f"{NAME}_{score}_shards", shard_size=1024),
        )
        record.save(arguments.output / f"{NAME}_{score}.parquet")
        layers = record.costs["layers"].mean(axis=0)
        print(f"{score}: {layers[0]:.2f} to {layers[-1]:.2f} layers a token", flush=True)


if __name__ == "__main__":
    main()
