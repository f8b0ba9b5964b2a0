"""A translator that stops at the first decoder layer that is confident of the next token.

The library includes a T5 with eight decoder layers, trained on photo captions (Multi30k, German to
English, 41 BLEU), and its losses on 2,461 test captions at 26 thresholds.
"""

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import swiftsure as ss
from swiftsure.text import CalmModel
from swiftsure_zoo.records import CALM, TRANSLATOR

record = ss.ThresholdRecord.load(CALM / "t5_multi30k_saturation.parquet")
policy = ss.calibrate(record, risk="gap", loss="bleu", epsilon=0.02, delta=0.1)
print(policy, "\n")

tokenizer = AutoTokenizer.from_pretrained(TRANSLATOR)
model = AutoModelForSeq2SeqLM.from_pretrained(TRANSLATOR, dtype=torch.float32).eval()
fast = CalmModel(model, policy)

captions = [
    "Ein Mann fährt mit einem roten Fahrrad durch den Park.",
    "Zwei kleine Kinder spielen am Strand mit einem Ball.",
    "Eine Frau in einem blauen Kleid liest auf einer Bank ein Buch.",
]
given = tokenizer(captions, padding=True, return_tensors="pt")
out = fast.generate(**given)
said = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
for german, english, layers in zip(captions, said, out.mean_layers, strict=True):
    print(f"{german}\n  {english}  ({layers:.1f} of 8 decoder layers per token)")
