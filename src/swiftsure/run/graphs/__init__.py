"""The graph core: what staged networks, CALM, BiLD and DeeDiff capture their work with.

| module | contents |
|---|---|
| `recorder` | captures functions as CUDA graphs, within limits; calls them elsewhere |
| `conditional` | parts of a graph that the device skips, or runs at the same time |
| `row_compaction` | which rows stay, and where they go, without telling the host how many |
| `blas` | the matrix library that is faster for a few rows |
| `precision` | the context in which models answer |

The only part of `swiftsure.run` that needs PyTorch.
"""
