"""`CachedPipeline`: a diffusers pipeline whose transformer runs with a cache, under a policy."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure.certify.policy import Policy
from swiftsure.diffusion.caches.hooks import BlockCounts, SampleReuse, cache_context, counted
from swiftsure.diffusion.caches.kinds import (
    Cache,
    DiffusersCache,
    SampleCache,
    cache_from_settings,
)
from swiftsure.run import PolicyBinding, check_same
from swiftsure.torch.fingerprinting import fingerprint

__all__ = ["SYSTEM", "CachedPipeline"]

SYSTEM = "diffusion cache"
FREE = ("generator", "latents", "output_type", "return_dict")
"""Arguments of a pipeline that a policy is not bound to."""


class CachedPipeline:
    """A diffusers pipeline with a cache, under a policy or at a threshold of your own.

    The cache is there only while this object runs; the pipeline itself stays as it is.

    Parameters
    ----------
    pipeline : DiffusionPipeline
        With the transformer in `pipeline.transformer`.
    policy : Policy, optional
        Made from a record of `sweep_cache`. It knows the cache and the arguments of the call, and
        is bound to weights, dtype, scheduler, cache and the version of diffusers.
    cache : Cache, optional
        Without a policy: the cache to run, `SampleCache()` by default.
    threshold : float
        Without a policy: the cache's threshold, which promises nothing; 0 for no cache.
    **call
        Arguments of every call, such as `num_inference_steps` and `guidance_scale`; under a
        policy, the policy's own.

    Raises
    ------
    ValueError
        If the policy was made for another pipeline, model, scheduler, cache or call.

    Examples
    --------
    `fast = CachedPipeline(pipe, policy)`, then `fast(class_labels=[3]).images`.
    """

    def __init__(
        self,
        pipeline: Any,
        policy: Policy | None = None,
        *,
        cache: Cache | None = None,
        threshold: float = 0.0,
        **call: Any,
    ) -> None:
        if not isinstance(getattr(pipeline, "transformer", None), nn.Module):
            raise TypeError(
                "`pipeline` must be a diffusers pipeline with a transformer, but got"
                f" {type(pipeline).__name__}."
            )
        self.pipeline = pipeline
        self.transformer: nn.Module = pipeline.transformer
        self.policy = policy
        self.inputs: list[str] | None = None
        self.warm_up: int | None = None
        if policy is None:
            self.cache = SampleCache() if cache is None else cache
            self.threshold = float(threshold)
            self.call = _plain_call(call)
            return
        if cache is not None or threshold:
            raise ValueError("`policy` sets the cache and its threshold; leave them out.")
        binding = PolicyBinding(policy, SYSTEM, "swiftsure.diffusion.sweep_cache")
        self.threshold = binding.dial("threshold") or 0.0
        if "warm_up" in policy.settings:
            self.warm_up = int(binding.dial("warm_up") or 0)
        if "cache" not in policy.settings:
            raise binding.refusal()
        self.cache = cache_from_settings(policy.settings["cache"])
        self.call = dict(policy.settings["call"])
        self.inputs = list(policy.settings["inputs"])
        self._check_call(call)
        expected = {k: v for k, v in policy.settings.items() if k in self.settings}
        check_same(expected, self.settings)
        binding.check_model(lambda: self.fingerprint)

    @property
    def settings(self) -> dict[str, Any]:
        """What a record binds its policies to, except the dials."""
        scheduler = self.pipeline.scheduler
        config = {k: v for k, v in scheduler.config.items() if not k.startswith("_")}
        return {
            "pipeline": type(self.pipeline).__name__,
            "scheduler": json.loads(
                json.dumps({"name": type(scheduler).__name__, **config}, default=str)
            ),
            "cache": self.cache.settings(),
            "call": self.call,
            "dtype": str(self.transformer.dtype).removeprefix("torch."),
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and configurations of all networks of the pipeline."""
        parts = {
            name: fingerprint(part)
            for name, part in sorted(self.pipeline.components.items())
            if isinstance(part, nn.Module)
        }
        return "sha256:" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __call__(self, **inputs: Any) -> Any:
        """Run the pipeline and return its output.

        Raises
        ------
        ValueError
            If the batch is larger than one and the cache decides by a mean over the batch, so that
            nothing is promised for an image; or an argument differs from the policy's.
        """
        given = self._check_call(inputs)
        n = _batch_size(given)
        output, _ = self.run(given, [self.threshold] * n, [self.warm_up] * n)
        return output

    def run(
        self,
        inputs: Mapping[str, Any],
        thresholds: Sequence[float],
        warm_up: Sequence[int | None],
        *,
        trace: bool = False,
    ) -> tuple[Any, SampleReuse | BlockCounts]:
        """Run the pipeline at a threshold per sample; return its output and what was counted."""
        n, counts = len(thresholds), BlockCounts(len(thresholds))
        same = len(set(zip(thresholds, warm_up, strict=True))) == 1
        per_sample = isinstance(self.cache, SampleCache)
        cached = any(each > 0 for each in thresholds)
        if cached and n > 1 and not self.cache.any_batch:
            raise ValueError(
                f"The cache {self.cache.settings()['name']} decides once per batch, by a mean over"
                f" its images, so nothing can be promised for one of them: generate one at a time"
                f" instead of {n}, or record with SampleCache, which decides for each image."
            )
        if not same and not per_sample:
            raise ValueError("`thresholds` of one call must be equal, except with SampleCache.")
        found: SampleReuse | BlockCounts = counts
        with ExitStack() as stack:
            stack.enter_context(counted(self.transformer, counts))
            if cached and isinstance(self.cache, SampleCache):
                own = self.cache.warm_up
                steps = np.asarray([own if each is None else each for each in warm_up])
                levels = np.asarray(thresholds, np.float32)
                found = SampleReuse(levels, steps, counts, trace=trace)
                stack.enter_context(found.installed(self.transformer))
            elif cached and isinstance(self.cache, DiffusersCache):
                stack.enter_context(self.cache.installed(self.transformer, thresholds[0]))
            stack.enter_context(cache_context(self.transformer))
            return self.pipeline(**inputs, **self.call), found

    def _check_call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that are not fixed; raise for one that differs from the policy's."""
        rest = dict(given)
        for name in list(rest):
            if name in self.call:
                check_same({name: self.call[name]}, {name: rest.pop(name)})
            elif self.inputs is not None and name not in (*self.inputs, *FREE):
                raise ValueError(
                    f"`policy` was made for calls without `{name}`, so it promises nothing with"
                    " it: leave it out, or record with it."
                )
        return rest


def sample_generators(seed: int, numbers: Sequence[int]) -> list[torch.Generator]:
    """Return a generator for each sample, which depends on the seed and its number only."""
    words = (np.random.SeedSequence([seed, int(k)]).generate_state(1, np.uint64) for k in numbers)
    return [torch.Generator().manual_seed(int(word[0] >> np.uint64(1))) for word in words]


def image_tensor(output: Any) -> Tensor:
    """Return a pipeline's images, (n, channels, height, width) in [0, 1]."""
    images: Any = output.images
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(images).permute(0, 3, 1, 2)
    return images.detach().float().clamp(0, 1)  # type: ignore[no-any-return]


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in call.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError(
                f"`{name}` must be a number or a text, to be stored in a policy, but got"
                f" {type(value).__name__}; what differs between samples belongs to the inputs."
            )
    return dict(call)


def _batch_size(inputs: Mapping[str, Any]) -> int:
    """Return the number of samples in a call's inputs."""
    sizes = {
        name: 1 if isinstance(value, str) else len(value)
        for name, value in inputs.items()
        if name not in FREE and (isinstance(value, str) or hasattr(value, "__len__"))
    }
    if not sizes or len(set(sizes.values())) > 1:
        raise ValueError(f"inputs must be lists of one length, one entry per image: got {sizes}.")
    return checks.count("batch", next(iter(sizes.values())))
