"""Time to train heads on a frozen network, with and without cached features:
`python benchmarks/train_heads.py --texts 4000`.

The network is a BERT of 6 layers and width 384 with random weights, as large as MiniLM.
"""

import argparse
import time

import torch
from transformers import BertConfig, BertForSequenceClassification

from swiftsure.torch import attach_heads, train_heads

LENGTH, BATCH, EPOCHS = 32, 32, 3
AT = [f"bert.encoder.layer.{k}" for k in range(5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=4000)
    n = parser.parse_args().texts
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    config = BertConfig(intermediate_size=1536, num_labels=77, **sizes)
    network = BertForSequenceClassification(config).eval()
    ids = torch.randint(1, config.vocab_size, (n, LENGTH)).split(BATCH)
    batches = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]
    seconds = {}
    for frozen in (True, "cached"):
        model = attach_heads(network, AT, batches[0])
        began = time.process_time()
        train_heads(model, batches, epochs=EPOCHS, frozen=frozen, progress=False)
        seconds[frozen] = time.process_time() - began
        print(f"frozen={frozen!r}: {seconds[frozen]:.1f} s of processor time", flush=True)
    print(f"{seconds['cached'] / seconds[True]:.2f} of the time")


if __name__ == "__main__":
    main()
