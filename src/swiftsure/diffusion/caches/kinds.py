"""Which cache runs: our per-sample one, or one of diffusers' by its configuration."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import diffusers
import torch
from diffusers import CacheMixin
from diffusers.hooks import (
    FirstBlockCacheConfig,
    HookRegistry,
    MagCacheConfig,
    apply_first_block_cache,
    apply_mag_cache,
)
from torch import nn

from swiftsure._lib import checks

__all__ = ["Cache", "DiffusersCache", "SampleCache", "cache_from_settings"]


class Cache(ABC):
    """A cache whose threshold is the dial: the larger, the more steps reuse stored residuals."""

    decides: str
    """What a decision looks at: "each sample", "the batch", or "the schedule" alone."""

    @property
    def any_batch(self) -> bool:
        """Whether an image does not depend on those that it shares a batch with."""
        return self.decides != "the batch"

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the cache's name, version and options, as stored in a policy."""


@dataclass(frozen=True)
class SampleCache(Cache):
    """A first-block cache that decides for each sample on its own, in batches of any size.

    With batches of one it makes the decisions of diffusers' FirstBlockCache. For transformers
    whose blocks have one stream of hidden states, such as DiT, PixArt or Wan.

    Parameters
    ----------
    warm_up : int
        Number of first steps that always run all blocks; a second dial in `sweep_cache`.
    """

    warm_up: int = 0
    decides = "each sample"

    def __post_init__(self) -> None:
        """Check the number of steps."""
        checks.count("warm_up", self.warm_up, 0)

    def settings(self) -> dict[str, Any]:
        """Return the cache's options."""
        return {"name": "SampleCache", "diffusers": diffusers.__version__, "warm_up": self.warm_up}


class DiffusersCache(Cache):
    """A cache of diffusers with a threshold.

    Parameters
    ----------
    config : FirstBlockCacheConfig, MagCacheConfig or another one with `threshold`
        Its own threshold does not matter. FirstBlockCache averages its decision over the batch, so
        a certified one takes one image at a time. MagCache decides by the schedule alone.
    """

    def __init__(self, config: Any) -> None:
        if not any(each.name == "threshold" for each in fields(config)):
            raise ValueError(
                f"`config` must have a threshold, but {type(config).__name__} has none."
            )
        self.config = replace(config, threshold=1.0)
        self.decides = "the schedule" if isinstance(config, MagCacheConfig) else "the batch"

    def settings(self) -> dict[str, Any]:
        """Return the configuration, except the threshold."""
        own = {each.name: getattr(self.config, each.name) for each in fields(self.config)}
        own.pop("threshold")
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
        return {"name": type(self.config).__name__, "diffusers": diffusers.__version__, **plain}

    @contextmanager
    def installed(self, transformer: nn.Module, threshold: float) -> Iterator[None]:
        """Run the transformer with this cache."""
        config = replace(self.config, threshold=threshold)
        if isinstance(transformer, CacheMixin):
            transformer.enable_cache(config)
            try:
                yield
            finally:
                transformer.disable_cache()
            return
        apply, names = _known(config)
        apply(transformer, config)
        try:
            yield
        finally:
            registry = HookRegistry.check_if_exists_or_initialize(transformer)
            for name in names:
                registry.remove_hook(name, recurse=True)


def _known(config: Any) -> tuple[Any, tuple[str, str]]:
    """Return how to apply a cache to a transformer that is no CacheMixin, and its hooks."""
    from diffusers.hooks import first_block_cache as first
    from diffusers.hooks import mag_cache as mag

    if isinstance(config, FirstBlockCacheConfig):
        return apply_first_block_cache, (first._FBC_LEADER_BLOCK_HOOK, first._FBC_BLOCK_HOOK)
    if isinstance(config, MagCacheConfig):
        names = mag._MAG_CACHE_LEADER_BLOCK_HOOK, mag._MAG_CACHE_BLOCK_HOOK
        return apply_mag_cache, names
    raise ValueError(
        f"`config` must be a FirstBlockCacheConfig or MagCacheConfig for this transformer, which"
        f" is not a CacheMixin of diffusers, but got {type(config).__name__}."
    )


def cache_from_settings(settings: Mapping[str, Any]) -> Cache:
    """Return the cache of a policy; raise if another version of diffusers is installed."""
    own = dict(settings)
    name, version = own.pop("name"), own.pop("diffusers")
    if version != diffusers.__version__:
        raise ValueError(
            f"`policy` was made with diffusers {version}, but {diffusers.__version__} is"
            " installed, whose cache may decide otherwise: calibrate again."
        )
    if name == "SampleCache":
        return SampleCache(**own)
    kind = getattr(diffusers.hooks, name, None)
    if kind is None or not name.endswith("CacheConfig"):
        raise ValueError(f"`policy` was made for a cache that diffusers does not have: {name}.")
    return DiffusersCache(kind(threshold=1.0, **own))
