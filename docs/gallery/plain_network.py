"""Turn a plain network into an early-exit one: attach heads, train them, calibrate and run.

The network is the small one that comes with the library: three convolutions trained on
Fashion-MNIST. Such a small network has little to save, but the steps are the same for a large one.
"""

import torch

import swiftsure as ss
from swiftsure.demo.network import prepared, small_network
from swiftsure.torch import EarlyExit, attach_heads, collect, train_heads
from swiftsure_zoo import records

plain = small_network()
sample = records.sample_images()  # 2,000 images that it was not trained on
images, labels = prepared(sample.images), torch.from_numpy(sample.labels)


def batches(first, last):
    return [(images[i : i + 100], labels[i : i + 100]) for i in range(first, last, 100)]


# Add exits after the first and the second block. The trained network itself does not change.
model = attach_heads(plain, ["2", "5"], images[:2])
train_heads(model, batches(0, 1000), epochs=4, progress=False)

record = collect(model, batches(1000, 1500))
accuracy = 1 - record.losses["zero_one"].mean(axis=0)
print("accuracy of the exits:", ", ".join(f"{a:.0%}" for a in accuracy))

policy = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.15)
print(policy)

fast = EarlyExit(model, policy)
exits = torch.cat([fast(x).exits for x, _ in batches(1500, 2000)])
print("\nexits of 500 other images:", exits.bincount(minlength=3).tolist())
