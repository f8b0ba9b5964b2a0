"""An initialisation from which a U-ViT with exits learns faster than from the published one."""

import torch
from torch import Tensor, nn

from swiftsure_zoo import UViT

__all__ = ["ease"]


@torch.no_grad()
def ease(model: UViT) -> None:
    """Initialise position embeddings as sinusoids, and convolutions and skips as identities.

    As published, position embeddings start as small noise, and attention takes very long to learn
    them: on toy images of lines the error stayed at 0.025 after 5,600 steps, as far as single
    patches can get, and with sinusoids it reached 0.004 in 1,600. All exits share one decoder, but
    each smooths its image by its own convolution. With random ones, tokens must encode the same
    noise differently after every block. Where a skip joins, a random layer would mix the tokens.
    With identities in both places the error of a small network after 450 steps fell from 0.084 to
    0.069.
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
