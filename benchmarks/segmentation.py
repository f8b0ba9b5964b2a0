"""Cost of a decision in segmentation: confidences of whole images against the forward pass.

By default a narrow network and small images, on a CPU. The published sizes, on a GPU:
`python benchmarks/segmentation.py --device cuda --width 48 --height 1024 --image-width 2048`.
"""

import argparse

import torch
from measure import Result, show
from rich.console import Console
from runtime import best
from torch import Tensor

from swiftsure.torch.scoring import confidence
from swiftsure.torch.segmentation import Enlarged, image_losses
from swiftsure_zoo import ADPC

TITLE = "segmentation: ADP-C (HRNet) with 19 classes; confidences of its three early exits"

SCORES = ("patch_top1", "patch_top_diff", "patch_entropy", "mean_top1", "quantile_top1")
N_CLASSES = 19
TARGET = 5.0


def network(width: int) -> ADPC:
    """Return a random ADP-C: width 48 is the published W48; 18 is W18 with more blocks."""
    torch.manual_seed(0)
    return ADPC(
        N_CLASSES,
        widths=tuple(width * factor for factor in (1, 2, 4, 8)),
        n_modules=(1, 4, 3),
        n_blocks=(4, 4, 4, 4),
        head_width=128,
        threshold=2.0,
    ).eval()


@torch.inference_mode()
def measure(device: str, width: int, height: int, image_width: int, repeats: int) -> list[Result]:
    model = network(width).to(device)
    images = torch.randn(1, 3, height, image_width, device=device)
    labels = torch.randint(0, N_CLASSES, (1, height, image_width), device=device)
    outputs: list[Tensor] = model(images)
    early = outputs[:-1]
    large = Enlarged(outputs, (height, image_width)).rows(0, slice(0, height))
    seconds = best(
        {
            "forward": [torch.inference_mode()(lambda: model(images))],
            **{name: [_scored(name, early)] for name in SCORES},
            "large": [_scored("patch_top1", [large] * len(early))],
            "losses": [torch.inference_mode()(lambda: image_losses(outputs, labels))],
        },
        device,
        repeats,
    )
    forward = seconds["forward"]
    where = f"{device}, width {width}, {image_width} x {height}: "
    sizes = " x ".join(map(str, reversed(outputs[0].shape[2:])))

    def share(what: str, key: str, note: str = "", at_most: float | None = None) -> Result:
        return Result(f"{where}{what}", 100 * seconds[key] / forward, "%", None, at_most, note)

    results = [
        share(
            f"{name} / forward pass",
            name,
            f"forward {1000 * forward:.3g} ms; scores {1000 * seconds[name]:.3g} ms, at {sizes}",
            TARGET if name.startswith("patch") else None,
        )
        for name in SCORES
    ]
    results.append(share("patch_top1 if logits were enlarged before", "large"))
    results.append(
        share("all losses of `collect` / forward pass", "losses", "4 exits, 3 losses, both risks")
    )
    if device == "cuda":
        results.append(_memory(model, images, outputs, labels))
    return results


def _scored(name: str, outputs: list[Tensor]):
    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [confidence(name, output) for output in outputs]

    return run


def _memory(model: ADPC, images: Tensor, outputs: list[Tensor], labels: Tensor) -> Result:
    """Measure the memory of the losses, in multiples of one exit's logits at full size."""

    def peak(function) -> int:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - held

    one_exit = 4 * N_CLASSES * labels.numel()
    forward = peak(lambda: model(images))
    losses = peak(lambda: image_losses(outputs, labels))
    return Result(
        "memory of the losses / one exit's logits at full size",
        losses / one_exit,
        at_most=1.0,
        note=f"{losses / 2**20:.0f} MiB; the forward pass takes {forward / 2**20:,.0f} MiB",
    )


def run(
    device: str = "cpu", width: int = 8, height: int = 256, image_width: int = 512, repeats: int = 5
) -> list[Result]:
    return measure(device, width, height, image_width, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=8, help="channels of the finest branch")
    parser.add_argument("--height", type=int, default=256, help="of the image")
    parser.add_argument("--image-width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    show(TITLE, run(**vars(arguments)), Console())


if __name__ == "__main__":
    main()
