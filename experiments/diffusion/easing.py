"""A start from which a U-ViT with exits learns faster than from the published one."""

import torch
from torch import Tensor, nn

from swiftsure.torch.models import UViT

__all__ = ["ease"]


@torch.no_grad()
def ease(model: UViT) -> None:
    """Start where there is less to find out: positions known, and the noise said alike everywhere.

    As published, positions of patches start as small noise, and attention takes very long to find
    them: on toy images of lines, denoising stayed at what single patches allow (an error of 0.025
    after 5,600 steps), and with sinusoids reached 0.004 in 1,600. All exits share one decoder, but
    each smooths its image by a convolution of its own, which starts at random, so that tokens have
    to say the same noise in other terms after every block; here these start by changing nothing.
    And where a skip joins, tokens start by going on as they are, and not as a random mixture. By
    these two the error of a small network after 450 steps fell from 0.084 to 0.069.
    """
    model.pos_embed[0, -model.n_patches :] = places(model).to(model.pos_embed.device)
    early = [*model.final_layer_in, model.final_layer_mid, *model.final_layer_out]
    for smoothing in [*early, model.final_layer]:
        if isinstance(smoothing, nn.Conv2d):
            nn.init.dirac_(smoothing.weight)
            nn.init.zeros_(smoothing.bias)
    for block in model.out_blocks:
        if block.skip_linear is not None:
            nn.init.eye_(block.skip_linear.weight[:, : model.width])


def places(model: UViT) -> Tensor:
    """Return sinusoids of each patch's row and column, of amplitude 1, (n_patches, width)."""
    side, half = round(model.n_patches**0.5), model.width // 2
    frequencies = 10_000.0 ** -(torch.arange(half // 2) / (half // 2))
    angles = torch.arange(side)[:, None] * frequencies
    along = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = along[:, None].expand(-1, side, -1), along[None].expand(side, -1, -1)
    return torch.cat([rows, columns], dim=2).reshape(model.n_patches, model.width)
