"""diffusers' MagCache on the trained DiT, from the root of the repository:
`python -m experiments.caches.mag --lpips lpips_alexnet.npz`.

MagCache decides by the step alone, from ratios of the sizes of successive residuals, which are
measured here on images of another seed. Prints blocks and LPIPS of MagCache and of SampleCache on
the same few images.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.hooks import MagCacheConfig

from experiments.caches.records import HERE, LOSS, labels_of, trained
from experiments.tables import markdown_table
from swiftsure.diffusion import Lpips
from swiftsure.diffusion.caches import DiffusersCache, SampleCache, sweep_cache

NAME = "dit_cifar10"
THRESHOLDS = {"MagCache": (0.03, 0.06, 0.12, 0.24), "SampleCache": (0.0672, 0.119, 0.1742)}


@contextmanager
def residual_sizes(transformer: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the norms of what all blocks together add, at each step and token."""
    found: list[torch.Tensor] = []
    blocks, entered = transformer.transformer_blocks, []
    hooks = [
        blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: entered.append((args or (kwargs["hidden_states"],))[0]),
            with_kwargs=True,
        ),
        blocks[-1].register_forward_hook(
            lambda *given: found.append((given[-1] - entered.pop()).norm(dim=-1))
        ),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def mag_ratios(pipe: Any, n: int, call: dict[str, Any]) -> list[float]:
    """Return the mean ratio of each step's residuals to those of the step before."""
    with residual_sizes(pipe.transformer) as sizes:
        generator = torch.Generator().manual_seed(1)
        pipe(class_labels=labels_of(n, 1), generator=generator, output_type="pt", **call)
    pairs = zip(sizes[1:], sizes, strict=False)
    return [1.0, *(float((now / before).mean()) for now, before in pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lpips", type=Path, required=True)
    parser.add_argument("--n", type=int, default=8, help="images")
    arguments = parser.parse_args()
    pipe, recipe = trained(NAME, HERE / "results")
    call = recipe["sampling"]
    steps = call["num_inference_steps"]
    ratios = mag_ratios(pipe, 2, call)
    print("ratios", [round(each, 3) for each in ratios], flush=True)
    config = MagCacheConfig(mag_ratios=ratios, num_inference_steps=steps)
    rows = []
    for cache in (DiffusersCache(config), SampleCache()):
        name = "MagCache" if isinstance(cache, DiffusersCache) else "SampleCache"
        record = sweep_cache(
            pipe,
            {"class_labels": labels_of(arguments.n, 0)},
            thresholds=THRESHOLDS[name],
            cache=cache,
            losses=[Lpips.load(arguments.lpips, side=64)],
            batch_size=arguments.n,
            **call,
        )
        for k in range(1, record.n_settings):
            means = record.costs["blocks"][:, k].mean(), record.inconsistencies[LOSS][:, k].mean()
            row = {"cache": name, "threshold": float(record.thresholds[k])}
            rows.append(row | {"blocks": float(means[0]), "LPIPS": float(means[1])})
    print(markdown_table(rows, 4))


if __name__ == "__main__":
    main()
