"""DeeDiff: early-exit diffusion; at each step the network stops once it is sure of the noise.

Tang et al., *DeeDiff: Dynamic Uncertainty-Aware Early Exiting for Accelerating Diffusion Model
Generation* (2023). This corrects two errors in the code published with the paper that this library
implements: an image gets the same noise at every threshold, so that pairs match; and images that
exit leave the batch, so that their compute is actually saved.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.certify.policy import Policy
from swiftsure.diffusion.graphs import RecordedSampler, RecordedSteps, Sampled
from swiftsure.diffusion.inputs import class_labels, resolve_sampler, sample_numbers
from swiftsure.diffusion.noise import sample_noise
from swiftsure.diffusion.results import Generated, joined
from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.diffusion.schedules import Sampler
from swiftsure.diffusion.steps import Denoised, StepCosts, denoise, exit_confidence, exit_output
from swiftsure.run import check_dtype, threshold_levels
from swiftsure.run.graphs.precision import inference
from swiftsure.run.graphs.recorder import CaptureBudget
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.modes import model_device, refuse_training
from swiftsure.torch.staged import StagedModel, refuse_unstaged

__all__ = ["DeeDiff"]

Batch = tuple[Tensor, ...]
"""The network's input: images, times and, if it has classes, labels."""

Labels = NDArray[np.int64] | None
Part = TypeVar("Part")


class DeeDiff:
    """A diffusion model with early exits under a policy.

    Parameters
    ----------
    model : StagedModel
        Maps (images, times[, labels]) to the noise, with its own confidence at every exit, like
        `swiftsure_zoo.UViT` or `Guided`; in evaluation mode. It has `image_shape`,
        (channels, height, width), and `n_classes` if it takes labels. If it has
        `confidence_at(exit_index, state)` and `estimate(exit_index, state, rows=None)`, noise is
        estimated only for the images that exit; otherwise `head` computes both at every exit.
        Without a policy it needs no early exits.
    policy : Policy, DeeDiffRule or float, optional
        A policy made from a record of `sweep`; or a rule or a threshold, which promises nothing.
        None runs the full model at all steps.
    sampler : Sampler, optional
        The policy's by default, or DDIM with 50 steps.
    dtype : str, optional
        Autocast dtype for the network ("bfloat16", "float16"); the policy's by default.
    graphs : bool
        Capture the sampler as a CUDA graph, once per batch size on first use (if it draws fresh
        noise or has very many steps: each step); the network must not move to another device
        afterwards. Faster where kernel launches are the bottleneck. Exited images stay in the batch
        until all have exited, so it is slower for large batches whose images exit at different
        depths.

    Raises
    ------
    ValueError
        If the policy was made for another score, number of exits, model, sampler or dtype, or the
        model is in training mode.

    Examples
    --------
    >>> from swiftsure.diffusion import DDIM
    >>> from swiftsure_zoo import UViT
    >>> _ = torch.manual_seed(0)
    >>> model = UViT(image_size=8, width=16, depth=2, n_heads=2).eval()
    >>> made = DeeDiff(model, 0.4, sampler=DDIM(3)).generate(2, seed=1)
    >>> tuple(made.images.shape), made.exits.shape
    ((2, 3, 8, 8), (2, 3))
    """

    def __init__(
        self,
        model: StagedModel,
        policy: Policy | DeeDiffRule | float | None = None,
        *,
        sampler: Sampler | None = None,
        dtype: str | None = None,
        graphs: bool = False,
    ) -> None:
        refuse_unstaged(model, fewest=1 if policy is None else 2)
        refuse_training(model)
        if not hasattr(model, "image_shape"):
            raise TypeError(
                "`model` must have the shape of its images as an attribute:"
                " `image_shape = (channels, height, width)`."
            )
        self.model = model
        self.image_shape: tuple[int, int, int] = model.image_shape
        self.policy = policy if isinstance(policy, Policy) else None
        self.rule = DeeDiffRule.of(policy)
        self.rule.check_exits(model.n_exits)
        binding = DeeDiffRule.bind(policy) if isinstance(policy, Policy) else None
        self.sampler = resolve_sampler({} if binding is None else binding.policy.settings, sampler)
        dtype = check_dtype(dtype) if binding is None else binding.dtype(dtype)
        self.dtype = None if dtype == "float32" else dtype
        self.graphs = graphs
        self._captured: dict[tuple[int, bool], Any] = {}
        self._budget = CaptureBudget()
        if binding is not None:
            binding.check_exits(model.n_exits)
            binding.check_model(lambda: self.fingerprint)

    def with_policy(self, policy: Policy) -> "DeeDiff":
        """Return the same network under another policy."""
        return DeeDiff(self.model, policy, graphs=self.graphs)

    @property
    def fingerprint(self) -> str:
        """Hash of the network and its inference dtype, which policies are bound to."""
        if not isinstance(self.model, nn.Module):
            raise ValueError("`model` must be an nn.Module to have a fingerprint.")
        return fingerprint(self.model, dtype=self.dtype)

    @property
    def n_classes(self) -> int | None:
        """Number of classes that the network is conditioned on, or None."""
        n_classes: int | None = getattr(self.model, "n_classes", None)
        return n_classes

    @property
    def settings(self) -> dict[str, Any]:
        """What a record binds its policies to, except the threshold."""
        found = self.rule.settings(self.model.n_exits) | {"sampler": self.sampler.settings()}
        return found if self.dtype is None else found | {"dtype": self.dtype}

    @cached_property
    def costs(self) -> StepCosts:
        """Cost of a step for each exit."""
        device = self._device()
        images = torch.zeros(1, *self.image_shape, device=device)
        batch = [images, images.new_zeros(1)]
        if self.n_classes is not None:
            batch.append(torch.zeros(1, dtype=torch.long, device=device))
        return StepCosts.of(self.model, tuple(batch), self.rule.looks(self.model.n_exits))

    def generate(
        self,
        samples: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        seed: int = 0,
        thresholds: Sequence[float | None] | None = None,
        batch_size: int = 64,
        progress: bool | None = False,
    ) -> Generated:
        """Generate images.

        A sample's noise depends only on the seed and the sample's number, so a sample is the same
        in any batch (up to rounding) and gets the same noise at every threshold.

        Parameters
        ----------
        samples : int or (n,)
            How many samples to generate, numbered from 0; or their numbers.
        labels : (n,), optional
            Classes, for a class-conditional network.
        thresholds : (n,), optional
            One per image, instead of the policy's; the policy's promise then does not hold.

        Raises
        ------
        ValueError
            If labels are missing or out of range, or an image or a confidence is not finite.
        """
        numbers = sample_numbers(samples)
        classes = class_labels(labels, len(numbers), self.n_classes)
        given: Any = [self.rule.threshold] * len(numbers) if thresholds is None else thresholds
        if not hasattr(given, "__len__") or len(given) != len(numbers):
            raise ValueError(
                f"`thresholds` must have one value per image, {len(numbers)}, but got {given!r}."
            )
        levels = threshold_levels("thresholds", list(given))

        def batch(rows: slice, labelled: Labels) -> Generated:
            return self._batch(numbers[rows], labelled, levels[rows], seed, advance)

        n_batches = -(-len(numbers) // checks.count("batch_size", batch_size))
        refuse_training(self.model)
        with steps("generating", n_batches * len(self.sampler.times), progress) as advance:
            return joined(_by_batch(batch, len(numbers), classes, batch_size))

    def confidences(
        self,
        samples: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        seed: int = 0,
        batch_size: int = 64,
    ) -> NDArray[np.float32]:
        """Run the full model and return every exit's confidence, (n, n_steps, n_exits - 1)."""
        numbers = sample_numbers(samples)
        classes = class_labels(labels, len(numbers), self.n_classes)
        refuse_training(self.model)

        def batch(rows: slice, labelled: Labels) -> Tensor:
            seen: list[Tensor] = []

            def answer(batch: Batch) -> Tensor:
                state, early, last = self.model.begin(batch), [], self.model.n_exits - 1
                for k in range(last):
                    state = self.model.advance(k, state)
                    early.append(exit_confidence(self.model, k, state)[0])
                seen.append(torch.stack(early, dim=1))
                noise: Tensor = exit_output(self.model, last, self.model.advance(last, state))
                return noise

            self._sample(numbers[rows], labelled, seed, answer)
            return torch.stack(seen, dim=1).cpu()

        return torch.cat(_by_batch(batch, len(numbers), classes, batch_size)).numpy()

    def _batch(
        self,
        numbers: NDArray[np.int64],
        labels: Labels,
        levels: NDArray[np.float32],
        seed: int,
        advance: Callable[[], None],
    ) -> Generated:
        asked = torch.from_numpy(levels).to(self._device())
        reachable = self.rule.reachable(levels)
        exits: list[Tensor] = []
        max_skipped = torch.full_like(asked, -torch.inf)
        min_taken = torch.full_like(asked, torch.inf)

        def answer(batch: Batch) -> Tensor:
            found = self._denoised(batch, asked, looks and self.rule.looks_in(len(exits)))
            exits.append(found.exits)
            torch.maximum(max_skipped, found.max_skipped, out=max_skipped)
            torch.minimum(min_taken, found.min_taken, out=min_taken)
            advance()
            return found.noise

        looks = bool(reachable.any())
        if self.graphs and RecordedSampler.suits(self.sampler):
            images, found, max_skipped, min_taken = self._in_one_graph(
                numbers, labels, asked, seed, looks
            )
            for _ in self.sampler.times:
                advance()
        else:
            images = self._sample(numbers, labels, seed, answer)
            found = torch.stack(exits, dim=1)
        _check_finite(images, numbers)
        taken, costs = found.cpu().numpy(), self.costs
        looked = [self.rule.looks_in(k) for k in range(taken.shape[1])]
        flops = np.where(looked & reachable[:, None], costs.flops[taken], costs.full_flops)
        unseen = np.float32(np.nan)
        return Generated(
            images=images.clamp(-1, 1),
            exits=taken,
            layers=costs.layers[taken].mean(axis=1),
            flops=flops.sum(axis=1),
            max_skipped=np.where(reachable, max_skipped.cpu().numpy(), unseen),
            min_taken=np.where(reachable, min_taken.cpu().numpy(), unseen),
            strict=self.rule.strict,
        )

    def _denoised(self, batch: Batch, levels: Tensor, looks: bool) -> Denoised:
        if not self.graphs:
            return denoise(self.model, batch, levels, self.rule, looks)
        steps: RecordedSteps = self._recorded(RecordedSteps, batch, looks)
        return steps(batch, levels)

    def _in_one_graph(
        self,
        numbers: NDArray[np.int64],
        labels: Labels,
        levels: Tensor,
        seed: int,
        looks: bool,
    ) -> Sampled:
        """Run all steps of the sampler as one captured graph."""
        images, classes = self._noise(numbers, labels, seed)
        batch = (images, torch.zeros_like(levels), *classes)
        sampler = self._recorded(partial(RecordedSampler, self.sampler), batch, looks)
        with torch.inference_mode():
            found: Sampled = sampler(images, classes, levels)
        return found

    def _recorded(self, kind: Callable[..., Any], batch: Batch, looks: bool) -> Any:
        """Return what was captured for batches of this size; captures it the first time."""
        device = batch[0].device
        if device.type != "cuda":
            raise ValueError(
                f"`graphs` needs the model on a CUDA device, but it is on {device}: move it, or"
                " leave `graphs` out."
            )
        key = len(batch[0]), looks
        if key not in self._captured:
            self._captured[key] = kind(
                self.model, batch, self.rule, looks, self.dtype, self._budget
            )
        return self._captured[key]

    def _noise(
        self, numbers: NDArray[np.int64], labels: Labels, seed: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the noise that sampling starts from, and the labels."""
        device = self._device()
        samples = torch.from_numpy(numbers).to(device)
        classes = () if labels is None else (torch.from_numpy(labels).to(device),)
        return sample_noise(seed, samples, self.sampler.schedule.n_times, self.image_shape), classes

    def _sample(
        self,
        numbers: NDArray[np.int64],
        labels: Labels,
        seed: int,
        answer: Callable[[Batch], Tensor],
    ) -> Tensor:
        """Run the sampler from noise to images; `answer` estimates the noise in a batch."""
        device, sampler = self._device(), self.sampler
        samples = torch.from_numpy(numbers).to(device)
        images, classes = self._noise(numbers, labels, seed)
        seen = sampler.schedule.times(torch.tensor(sampler.times, device=device))
        for k, time in enumerate(sampler.times):
            with inference(device, self.dtype):
                batch = (images, seen[k].expand(len(numbers)), *classes)
                noise = answer(batch).to(images.dtype)
            with torch.inference_mode():
                fresh = None
                if sampler.draws(k):
                    fresh = sample_noise(seed, samples, time, self.image_shape)
                images = sampler.step(k, images, noise, fresh)
        return images

    def _device(self) -> torch.device:
        return model_device(self.model) or torch.device("cpu")


def _check_finite(images: Tensor, numbers: NDArray[np.int64]) -> None:
    """Raise if an image is not finite."""
    broken = images.isfinite().flatten(1).all(dim=1).logical_not()
    if broken.any():
        row = int(broken.nonzero()[0, 0])
        raise ValueError(
            f"The image of sample {numbers[row]} is not finite: look for NaN in the network's"
            " weights, or run it in a wider dtype."
        )


def _by_batch(
    make: Callable[[slice, Labels], Part], n: int, labels: Labels, size: int
) -> list[Part]:
    """Call `make` on each batch of n samples, with its labels; return the results."""
    parts = [slice(start, start + size) for start in range(0, n, checks.count("batch_size", size))]
    return [make(rows, None if labels is None else labels[rows]) for rows in parts]
