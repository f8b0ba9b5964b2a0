"""A cascade of two trained networks: the large one runs only if the small one is unsure.

Both were trained on Fashion-MNIST. The small one is the first stage of the library's network, with
90 % accuracy. The large one, from the zoo, is an MSDNet with 94 %; only its last exit is used.
"""

import torch
from torch import nn

import swiftsure as ss
from swiftsure.demo.network import trained_exits
from swiftsure.torch import Cascade, EarlyExit, collect
from swiftsure_zoo import msdnet_fashion_mnist, prepared, records


class Upto(nn.Module):
    """A network with several exits, run to one of them."""

    def __init__(self, network, exit_index):
        super().__init__()
        self.network, self.exit_index = network, exit_index

    def forward(self, batch):
        state = self.network.begin(batch)
        for k in range(self.exit_index + 1):
            state = self.network.advance(k, state)
        return self.network.head(self.exit_index, state)


cascade = Cascade([Upto(trained_exits(), 0), Upto(msdnet_fashion_mnist(), 4)]).eval()

sample = records.sample_images()
images, labels = prepared(sample.images), torch.from_numpy(sample.labels)
batches = [(images[i : i + 100], labels[i : i + 100]) for i in range(0, 900, 100)]

record = collect(cascade, batches[:6], losses=["zero_one"])
small, large = record.costs["flops"]
print(f"The small network takes {small / (large - small):.1%} of the large one's FLOPs.")

policy = ss.calibrate(record, risk="gap", loss="zero_one", epsilon=0.02, delta=0.1)
print(policy)

fast = EarlyExit(cascade, policy)
right, asked = 0, 0
for x, y in batches[6:]:
    out = fast(x)
    right += int((out.predictions == y).sum())
    asked += int((out.exits == 1).sum())
n = sum(len(y) for _, y in batches[6:])
print(
    f"\nOn {n} other images: accuracy {right / n:.1%}, the large network asked for {asked / n:.0%}."
)
