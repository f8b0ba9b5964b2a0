"""Caches of diffusers' transformers under a policy.

| module | contents |
|---|---|
| `kinds` | which cache: our per-sample one, or one of diffusers' by its configuration |
| `hooks` | hooks on the blocks: count those that run; reuse residuals sample by sample |
| `pipeline` | `CachedPipeline`: a diffusers pipeline under a policy, and what it is bound to |
| `sweeping` | `sweep_cache`: the same samples at every setting, as a record |
"""

try:
    import diffusers as _diffusers  # noqa: F401
except ImportError:
    raise ImportError(
        "swiftsure.diffusion.caches needs diffusers: pip install 'swiftsure[diffusers]'."
    ) from None

from swiftsure.diffusion.caches.kinds import Cache, DiffusersCache, SampleCache
from swiftsure.diffusion.caches.pipeline import CachedPipeline
from swiftsure.diffusion.caches.sweeping import sweep_cache

__all__ = ["Cache", "CachedPipeline", "DiffusersCache", "SampleCache", "sweep_cache"]
