"""Turn a plain network into an early-exit one: attach heads, train them, calibrate and run.

The network is the one that comes with the library, without its own exits: twelve convolutions
trained on Fashion-MNIST.
"""

import torch

import swiftsure as ss
from swiftsure.demo.network import plain_network, prepared
from swiftsure.torch import EarlyExit, attach_heads, collect, train_heads
from swiftsure_zoo import records

plain = plain_network()
sample = records.sample_images()  # 2,000 images that it was not trained on
images, labels = prepared(sample.images), torch.from_numpy(sample.labels)


def batches(first, last):
    return [(images[i : i + 100], labels[i : i + 100]) for i in range(first, last, 100)]


# Add exits after the first and the second stage. The trained network itself does not change.
model = attach_heads(plain, ["first", "second"], images[:2])
train_heads(model, batches(0, 500), epochs=4, progress=False)

record = collect(model, batches(500, 900))
accuracy = 1 - record.losses["zero_one"].mean(axis=0)
print("accuracy of the exits:", ", ".join(f"{a:.0%}" for a in accuracy))

policy = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.15)
print(policy)

fast = EarlyExit(model, policy)
exits = torch.cat([fast(x).exits for x, _ in batches(900, 1100)])
print("\nexits of 200 other images:", exits.bincount(minlength=3).tolist())
