"""Threshold records of a pair of translation models, from the root of the repository:
`python -m experiments.bild.records --data FOLDER`.

The small model drafts, the large one checks; the rollback threshold is swept over all test
sentences of Multi30k, with the fallback threshold at 0.5. Models come from
experiments/translation/results (bild_large, bild_small). Writes bild.parquet, and bild.json with
the corpus BLEU of both models. Drafts are generated one sentence at a time, so several processes
(`--workers`) help, also on a GPU.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from experiments import commands
from experiments.calm.records import PARTS
from experiments.translation.data import Pairs, multi30k
from experiments.translation.train import HERE as TRANSLATION
from experiments.translation.train import translations
from swiftsure import RunOptions, ThresholdRecord
from swiftsure.text import BigLittle, Rollback, Texts, sweep_pair

HERE = Path(__file__).parent
THRESHOLDS = np.round(np.geomspace(0.6, 12.0, 20), 3)
"""Safest first; those below log 2 only change the time."""


def loaded(folder: Path) -> Any:
    """Return a saved model, on the GPU if there is one."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(commands.device()).eval()


def swept(
    folders: tuple[Path, Path], tests: Pairs, output: Path, workers: int, worker: int
) -> ThresholdRecord:
    """Return the record of one worker's sentences."""
    first, end = (len(tests.german) * k // workers for k in (worker, worker + 1))
    return sweep_pair(
        BigLittle(*map(loaded, folders), Rollback(0.0, fallback=0.5)),
        Texts(
            tests.german[first:end],
            AutoTokenizer.from_pretrained(folders[0]),
            tests.english[first:end],
            range(first, end),
        ),
        thresholds=THRESHOLDS,
        losses=["bleu", "rouge_l"],
        max_new_tokens=64,
        run=RunOptions(shards=output / f"bild_shards_{worker + 1}_of_{workers}", shard_size=64),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--large", type=Path, default=TRANSLATION / "results" / "bild_large")
    parser.add_argument("--small", type=Path, default=TRANSLATION / "results" / "bild_small")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--sentences", type=int, help="of each part; all by default")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    arguments = parser.parse_args()
    folders = (arguments.large, arguments.small)
    tokenizer = AutoTokenizer.from_pretrained(arguments.large)
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = slice(arguments.sentences)
    tests = Pairs([], [])
    for part in PARTS:
        pairs = multi30k(arguments.data / "multi30k", part)
        tests += Pairs(pairs.german[kept], pairs.english[kept])
    report = {
        name: round(
            sacrebleu.corpus_bleu(
                translations(loaded(folder), tokenizer, tests.german), [tests.english]
            ).score,
            2,
        )
        for name, folder in zip(("large", "small"), folders, strict=True)
    }
    print(f"BLEU: {report}", flush=True)
    (arguments.output / "bild.json").write_text(json.dumps({"bleu": report}, indent=2) + "\n")
    part = partial(swept, folders, tests, arguments.output, arguments.workers)
    if arguments.workers == 1:
        record = part(0)
    else:
        with ProcessPoolExecutor(
            arguments.workers, get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            record = ThresholdRecord.concatenate(list(pool.map(part, range(arguments.workers))))
    record.save(arguments.output / "bild.parquet")
    for name, values in record.costs.items():
        mean = np.atleast_2d(values).mean(axis=0)
        print(f"{name}: {mean[0]:.3g} to {mean[-1]:.3g}", flush=True)


if __name__ == "__main__":
    main()
