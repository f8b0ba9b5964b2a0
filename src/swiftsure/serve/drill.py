"""An alarm drill: images that become noisy are sent to a server until it falls back."""

import http.client
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

__all__ = ["DrillResult", "drill"]


@dataclass(frozen=True)
class DrillResult:
    """How a drill went.

    Attributes
    ----------
    sent : int
        How many images were sent.
    fallback_after : int, optional
        How many noisy images were sent before the full model answered; None if it never did.
    """

    sent: int
    fallback_after: int | None


def drill(
    address: str,
    images: NDArray[np.float32],
    *,
    clean: int = 300,
    noise: float = 0.5,
    most: int = 20_000,
    token: str | None = None,
    seed: int = 0,
    go_on: Callable[[], bool] = lambda: True,
) -> DrillResult:
    """Send images one by one, noisy ones after the first `clean`, until the full model answers.

    Parameters
    ----------
    address : str
        Of the server, such as "http://127.0.0.1:8000".
    images : (n, ...)
        Inputs of the model, drawn at random with replacement.
    noise : float
        Standard deviation of the noise.
    most : int
        How many images to send at most.
    go_on : callable
        Asked before each image; the drill ends if it returns False.
    """
    rng = np.random.default_rng(seed)
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    headers = {"Content-Type": "application/x-npy"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        for sent in range(most):
            if not go_on():
                return DrillResult(sent, None)
            image = images[rng.integers(len(images))]
            if sent >= clean:
                image = image + noise * rng.standard_normal(image.shape, np.float32)
            body = io.BytesIO()
            np.save(body, image.astype(np.float32), allow_pickle=False)
            connection.request("POST", "/predict", body.getvalue(), headers)
            response = connection.getresponse()
            content = json.loads(response.read())
            if response.status != 200:
                raise RuntimeError(f"The server answered {response.status}: {content['error']}")
            if content["full_model"]:
                return DrillResult(sent + 1, sent - clean)
    finally:
        connection.close()
    return DrillResult(most, None)
