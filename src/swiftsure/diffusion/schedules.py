"""Noise schedules, and the DDPM and DDIM samplers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from math import sqrt
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure._lib import checks

__all__ = ["DDIM", "DDPM", "Sampler", "Schedule", "sampler_from_settings"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """A noise schedule whose variances rise linearly with time (Ho et al., 2020).

    Parameters
    ----------
    n_times : int
        T; times are 0 to T - 1.
    first_beta, last_beta : float
        Variance added at the first and the last time.
    time_scale : float
        Networks see the time t as time_scale * t / T. DeeDiff was published with 1; with 1000, the
        sinusoids of a U-ViT can tell neighbouring times apart.

    Examples
    --------
    >>> Schedule().signal[[0, 499, 999]].round(5).tolist()
    [0.9999, 0.07859, 4e-05]
    """

    n_times: int = 1000
    first_beta: float = 1e-4
    last_beta: float = 0.02
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check every field."""
        checks.count("n_times", self.n_times, 2)
        checks.between("first_beta", self.first_beta, 0, 1)
        checks.between("last_beta", self.last_beta, 0, 1)
        checks.between("time_scale", self.time_scale, 0, np.inf)

    @cached_property
    def betas(self) -> Floats:
        """Variance added at each time, (T,)."""
        return np.linspace(self.first_beta, self.last_beta, self.n_times, dtype=np.float64)

    @cached_property
    def signal(self) -> Floats:
        """Fraction of the image's variance left at each time, ᾱ, (T,)."""
        return np.asarray(np.cumprod(1 - self.betas), np.float64)

    def times(self, times: Tensor) -> Tensor:
        """Return times as the network sees them."""
        return times.float() * (self.time_scale / self.n_times)

    def noised(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the images with noise added for the given times, (n,)."""
        share = _signal_on(self, images.device)[times].float()[:, None, None, None]
        return share.sqrt() * images + (1 - share).sqrt() * noise


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _signal_on(schedule: Schedule, device: torch.device) -> Tensor:
    """Return a schedule's signal on a device; cached, since each copy would synchronise."""
    return torch.from_numpy(schedule.signal).to(device)


@runtime_checkable
class Sampler(Protocol):
    """A sampler: goes from noise to images, one step at each of its times."""

    @property
    def schedule(self) -> Schedule:
        """The schedule that the network was trained with."""

    @property
    def times(self) -> tuple[int, ...]:
        """Times of the steps, falling."""

    def draws(self, step: int) -> bool:
        """Whether a step adds fresh noise."""

    def step(self, step: int, images: Tensor, noise: Tensor, fresh: Tensor | None) -> Tensor:
        """Return the images after a step, given those before it and the estimated noise."""

    def settings(self) -> dict[str, Any]:
        """Return the sampler's parameters, as stored in a policy."""


@dataclass(frozen=True)
class DDPM:
    """DDPM sampler (Ho et al., 2020): a step at every time with fresh noise, as in DeeDiff's code.

    The last step is at time 1, as in the published code.

    Parameters
    ----------
    schedule : Schedule
    variance : {"beta", "beta_tilde"}
        Variance of the fresh noise: the schedule's β, or that of the exact posterior step, β̃.
    """

    schedule: Schedule = field(default_factory=Schedule)
    variance: Literal["beta", "beta_tilde"] = "beta"

    def __post_init__(self) -> None:
        """Check the variance."""
        checks.choice("variance", self.variance, ["beta", "beta_tilde"])

    @property
    def times(self) -> tuple[int, ...]:
        """Times of the steps, falling."""
        return tuple(range(self.schedule.n_times - 1, 0, -1))

    def draws(self, step: int) -> bool:
        """Whether a step adds fresh noise: all but the last."""
        return step < len(self.times) - 1

    def step(self, step: int, images: Tensor, noise: Tensor, fresh: Tensor | None) -> Tensor:
        """Return the images after a step."""
        time = self.times[step]
        beta, signal = float(self.schedule.betas[time]), float(self.schedule.signal[time])
        cleaner = (images - beta / sqrt(1 - signal) * noise) / sqrt(1 - beta)
        if fresh is None:
            return cleaner
        variance = beta
        if self.variance == "beta_tilde":
            variance *= (1 - float(self.schedule.signal[time - 1])) / (1 - signal)
        return cleaner + sqrt(variance) * fresh

    def settings(self) -> dict[str, Any]:
        """Return the sampler's parameters, as stored in a policy."""
        return {"name": "ddpm", "variance": self.variance, **asdict(self.schedule)}


@dataclass(frozen=True)
class DDIM:
    """DDIM sampler (Song et al., 2021): a few evenly spaced steps, by default without fresh noise.

    Parameters
    ----------
    n_steps : int
    schedule : Schedule
    eta : float
        Amount of fresh noise, in [0, 1]; 1 is as much as DDPM's "beta_tilde".
    clip : bool
        Clip each step's prediction of the clean image to [-1, 1].

    Examples
    --------
    >>> DDIM(5).times
    (999, 799, 599, 399, 199)
    """

    n_steps: int = 50
    schedule: Schedule = field(default_factory=Schedule)
    eta: float = 0.0
    clip: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        if checks.count("n_steps", self.n_steps) > self.schedule.n_times:
            raise ValueError(
                f"`n_steps` must be at most the schedule's {self.schedule.n_times} times, but got"
                f" {self.n_steps}."
            )
        if not 0 <= self.eta <= 1:
            raise ValueError(f"`eta` must be in [0, 1], but got {self.eta}.")

    @property
    def times(self) -> tuple[int, ...]:
        """Times of the steps, falling."""
        return tuple(
            k * self.schedule.n_times // self.n_steps - 1 for k in range(self.n_steps, 0, -1)
        )

    def draws(self, step: int) -> bool:
        """Whether a step adds fresh noise."""
        return self.eta > 0 and step < self.n_steps - 1

    def step(self, step: int, images: Tensor, noise: Tensor, fresh: Tensor | None) -> Tensor:
        """Return the images after a step."""
        times = self.times
        signal = float(self.schedule.signal[times[step]])
        last = step == self.n_steps - 1
        cleaner = 1.0 if last else float(self.schedule.signal[times[step + 1]])
        clean = (images - sqrt(1 - signal) * noise) / sqrt(signal)
        if self.clip:
            clean = clean.clamp(-1, 1)
            noise = (images - sqrt(signal) * clean) / sqrt(1 - signal)
        variance = 0.0
        if fresh is not None:
            variance = self.eta**2 * (1 - cleaner) / (1 - signal) * (1 - signal / cleaner)
        moved = sqrt(cleaner) * clean + sqrt(1 - cleaner - variance) * noise
        return moved if fresh is None else moved + sqrt(variance) * fresh

    def settings(self) -> dict[str, Any]:
        """Return the sampler's parameters, as stored in a policy."""
        own = {"n_steps": self.n_steps, "eta": self.eta, "clip": self.clip}
        return {"name": "ddim", **own, **asdict(self.schedule)}


def sampler_from_settings(settings: Mapping[str, Any]) -> DDPM | DDIM:
    """Return the sampler that a record or a policy was made with.

    Examples
    --------
    >>> sampler_from_settings(DDIM(20).settings()) == DDIM(20)
    True
    """
    own = dict(settings)
    name = checks.choice("sampler", own.pop("name"), ["ddpm", "ddim"])
    schedule = Schedule(**{key: own.pop(key) for key in asdict(Schedule()) if key in own})
    return DDPM(schedule, **own) if name == "ddpm" else DDIM(schedule=schedule, **own)
