"""`DiffusionEngine`: an image per request, from `DeeDiff` or a cached pipeline."""

import base64
import io
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from swiftsure.diffusion import DeeDiff
from swiftsure.diffusion.caches import CachedPipeline
from swiftsure.diffusion.caches.pipeline import image_tensor, sample_generators
from swiftsure.diffusion.image_losses import compare_images
from swiftsure.diffusion.sweeping import image_losses
from swiftsure.serve.engine import (
    Answer,
    AnyPolicy,
    Comparison,
    Description,
    ExitCosts,
    InvalidRequestError,
)
from swiftsure.serve.engines.by_slice import answer_by_slice, policies_of

__all__ = ["DiffusionEngine", "ImageInputs"]

SEED = 0
"""Of all noise; images differ by the number of their sample."""
MOST = 1 << 31
"""Numbers of samples are below this."""


class ImageInputs:
    """Checks requests for images: an object with the pipeline's inputs, and a `sample` number.

    Parameters
    ----------
    names : sequence of str
        Of the inputs, such as "label" or "prompt".
    n_classes : int, optional
        How many labels there are.
    """

    def __init__(self, names: Sequence[str], n_classes: int | None = None) -> None:
        self.names, self.n_classes = tuple(names), n_classes

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of one sample."""
        fields: dict[str, Any] = {name: {"type": ["integer", "string"]} for name in self.names}
        number = {"type": "integer", "description": "Equal numbers get equal noise."}
        return {
            "type": "object",
            "properties": {**fields, "sample": number},
            "required": list(self.names),
        }

    def sample(self, inputs: Any) -> dict[str, Any]:
        """Return a checked request; without a number, it gets one at random."""
        if not isinstance(inputs, dict) or inputs.keys() - {"sample"} != set(self.names):
            names = ", ".join(self.names) or "nothing"
            raise InvalidRequestError(
                f"`inputs` must be an object with {names} and, if you like, `sample`."
            )
        given = inputs.get("sample")
        number = random.SystemRandom().randrange(MOST) if given is None else given
        whole = isinstance(number, int) and not isinstance(number, bool)
        if not whole or not 0 <= number < MOST:
            raise InvalidRequestError(f"`sample` must be a whole number in [0, {MOST}).")
        found = {name: inputs[name] for name in self.names}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise InvalidRequestError(f"`{name}` must be a whole number or a text.")
            bounded = self.n_classes is not None
            if bounded and not (isinstance(value, int) and 0 <= value < self.n_classes):  # type: ignore[operator]
                raise InvalidRequestError(f"`{name}` must be in [0, {self.n_classes}).")
        return {**found, "sample": number}

    def covers(self, _sample: Any, _policy: Any) -> bool:
        """Return True: there are no options beside the inputs."""
        return True

    def samples(self, _inputs: Any) -> None:
        """Return None: an array holds no requests for images."""
        return


class _Made(NamedTuple):
    """An image, (channels, height, width) in [0, 1], and how it was made."""

    image: NDArray[np.float32]
    exit: int
    costs: Mapping[str, tuple[float, float]]


class DiffusionEngine:
    """Generates images under a policy; equal sample numbers get equal noise.

    Parameters
    ----------
    system : DeeDiff or CachedPipeline
        With a policy.
    """

    lanes = 1
    policy: AnyPolicy

    def __init__(self, system: DeeDiff | CachedPipeline, *, name: str = "images") -> None:
        if system.policy is None:
            raise ValueError("`system` must have a policy: a threshold alone promises nothing.")
        self.system, self.policy, self.name = system, system.policy, name
        self._systems: dict[str | None, DeeDiff | CachedPipeline] = {None: system}
        self.costs: dict[str, ExitCosts] = {}
        if isinstance(system, DeeDiff):
            self.n_exits = system.model.n_exits
            self.inputs = ImageInputs(
                () if system.n_classes is None else ["label"], system.n_classes
            )
        else:
            self.n_exits = 2
            self.inputs = ImageInputs(system.inputs or ())

    def describe(self) -> Description:
        """Return what goes in and out."""
        outputs = {
            "image": {
                "type": "string",
                "contentEncoding": "base64",
                "contentMediaType": "image/png",
            },
            "sample": {"type": "integer"},
        }
        example = {**dict.fromkeys(self.inputs.names, 0), "sample": 0}
        return Description(self.name, self.inputs.schema(), outputs, example, arrays=False)

    def measure(self) -> None:
        """Do nothing: what an image costs depends on its steps, and is known afterwards."""

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for another model or sampler."""
        self._systems_of(policy)

    def check_loss(self, loss: str) -> None:
        """Raise if a loss cannot compare two images."""
        image_losses([loss])

    def install(self, policy: AnyPolicy) -> None:
        """Use another policy."""
        self._systems, self.policy = self._systems_of(policy), policy

    def _systems_of(self, policy: AnyPolicy) -> dict[str | None, DeeDiff | CachedPipeline]:
        return {name: self._under(own) for name, own in policies_of(policy).items()}

    def _under(self, policy: Any) -> DeeDiff | CachedPipeline:
        if isinstance(self.system, DeeDiff):
            return self.system.with_policy(policy)
        return CachedPipeline(self.system.pipeline, policy)

    def answer(
        self, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
    ) -> list[Answer | InvalidRequestError]:
        """Return one image per sample."""
        return answer_by_slice(samples, slices, {} if full else self._systems, self._answers)

    def _answers(
        self, samples: Sequence[Any], system: DeeDiff | CachedPipeline | None
    ) -> list[Answer | InvalidRequestError]:
        answers: list[Answer | InvalidRequestError] = []
        for sample, made in zip(samples, self._images(samples, system), strict=True):
            content = {"image": _png(made.image), "sample": sample["sample"]}
            answers.append(Answer(content, made.exit, None, made.image, made.costs))
        return answers

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how an image compares with the full model's, from the same noise."""
        (full,) = self._images([sample], None)
        served, other = (torch.from_numpy(each)[None] for each in (answer.output, full.image))
        lost = compare_images(image_losses([loss])[0], served, other, (0, 1))
        return Comparison(float(lost[0]))

    def _images(
        self, samples: Sequence[Any], system: DeeDiff | CachedPipeline | None
    ) -> list[_Made]:
        numbers = [each["sample"] for each in samples]
        given = {name: [each[name] for each in samples] for name in self.inputs.names}
        if isinstance(self.system, DeeDiff):
            return self._exited(numbers, given.get("label"), system)
        return self._cached(numbers, given, system)

    def _exited(self, numbers: Sequence[int], labels: Any, system: Any) -> list[_Made]:
        fast: Any = self.system if system is None else system
        thresholds = [None] * len(numbers) if system is None else None
        found = fast.generate(numbers, labels=labels, seed=SEED, thresholds=thresholds)
        full = fast.costs.full_flops * found.exits.shape[1]
        images = ((found.images + 1) / 2).float().cpu().numpy()
        depth = np.ceil(found.exits.mean(axis=1)).astype(int)
        return [
            _Made(image, int(exit_), {"flops": (float(flops), float(full))})
            for image, exit_, flops in zip(images, depth, found.flops, strict=True)
        ]

    def _cached(self, numbers: Sequence[int], given: Any, system: Any) -> list[_Made]:
        fast: Any = self.system if system is None else system
        whole = system is None or fast.cache.any_batch
        if not whole and len(numbers) > 1:  # this cache decides for a batch as a whole
            rows = range(len(numbers))
            alone = [{name: [values[k]] for name, values in given.items()} for k in rows]
            return [self._cached([numbers[k]], alone[k], system)[0] for k in rows]
        n = len(numbers)
        inputs = {**given, "generator": sample_generators(SEED, numbers), "output_type": "pt"}
        level = 0.0 if system is None else fast.threshold
        output, _ = fast.run(inputs, [level] * n, [fast.warm_up] * n)
        exit_ = int(system is None or level <= 0)
        return [_Made(image, exit_, {}) for image in image_tensor(output).cpu().numpy()]


def _png(image: NDArray[np.float32]) -> str:
    """Return an image as a PNG file in base64."""
    from PIL import Image

    pixels = (image * 255).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
