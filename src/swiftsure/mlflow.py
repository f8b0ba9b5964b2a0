"""A certified model as an MLflow model: `mlflow.pyfunc.load_model` runs it at its policy.

The MLflow model holds the folder as it is (no pickles), its policy, and the promise as metadata.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.certify.policy import Policy

__all__ = ["CertifiedModel", "log_model", "save_model"]

EXPORTED = "manifest.json"
"""What only folders of `swiftsure export` have."""


def save_model(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], **settings: Any
) -> None:
    """Write a folder of a certified model as an MLflow model.

    Parameters
    ----------
    folder : path
        From `swiftsure export`, or from `EarlyExit.save_pretrained` with a network of transformers.
    path : path
        The MLflow model's folder, which must not exist.
    **settings
        As for `mlflow.pyfunc.save_model`, such as `signature`.
    """
    _pyfunc().save_model(str(path), **_described(folder), **settings)


def log_model(folder: str | os.PathLike[str], name: str = "model", **settings: Any) -> Any:
    """Log a folder of a certified model to the active run of MLflow.

    Parameters
    ----------
    folder : path
        As for `save_model`.
    name : str
        Name of the model in the run.
    **settings
        As for `mlflow.pyfunc.log_model`, such as `registered_model_name`.

    Returns
    -------
    info : mlflow.models.ModelInfo
        Its `model_uri` is what `mlflow.pyfunc.load_model` takes.
    """
    return _pyfunc().log_model(name=name, **_described(folder), **settings)


class CertifiedModel:
    """What `mlflow.pyfunc.load_model` calls.

    Parameters
    ----------
    folder : path
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.exported = (Path(folder) / EXPORTED).is_file()
        self.fast: Any
        if self.exported:
            from swiftsure import onnx

            self.fast = onnx.EarlyExit.load(folder)
        else:
            from swiftsure.torch import EarlyExit

            self.fast = EarlyExit.from_pretrained(folder)

    def predict(self, inputs: Any, params: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Answer a batch.

        Parameters
        ----------
        inputs : array, mapping of names to arrays, or data frame
            A column of a data frame is an input; its values may be lists. A single column is the
            model's only input.
        params : mapping, optional
            Not used.

        Returns
        -------
        answers : DataFrame
            With the columns `prediction` and `exit`, counted from 0.
        """
        import pandas as pd

        batch = _arrays(inputs)
        if not self.exported:
            import torch

            batch = (
                {name: torch.as_tensor(each) for name, each in batch.items()}
                if isinstance(batch, dict)
                else torch.as_tensor(batch)
            )
        out = self.fast(batch)
        return pd.DataFrame(
            {"prediction": np.asarray(out.predictions), "exit": np.asarray(out.exits)}
        )


def _load_pyfunc(path: str) -> CertifiedModel:
    """Return what MLflow calls; MLflow finds this function by its name."""
    return CertifiedModel(path)


def _described(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what an MLflow model says of a folder."""
    from swiftsure import __version__

    file = Path(folder) / "policy.json"
    if not file.is_file():
        raise ValueError(f"`folder` must hold a certified model, but {folder} has no policy.json.")
    extra = "onnx" if (Path(folder) / EXPORTED).is_file() else "text"
    return {
        "loader_module": "swiftsure.mlflow",
        "data_path": str(folder),
        "pip_requirements": [f"swiftsure[{extra},pandas]=={__version__}"],
        "metadata": {"swiftsure.promise": str(Policy.load(file)).splitlines()[0]},
    }


def _arrays(inputs: Any) -> Any:
    """Return an array, or an array for each name."""
    if hasattr(inputs, "columns"):
        found = {str(name): _array(list(inputs[name])) for name in inputs.columns}
        return next(iter(found.values())) if len(found) == 1 else found
    if isinstance(inputs, dict):
        return {name: _array(each) for name, each in inputs.items()}
    return _array(inputs)


def _array(values: Any) -> NDArray[Any]:
    """Return an array in single precision, as models take it; JSON and tables hold doubles."""
    found = np.asarray(values)
    return found.astype(np.float32) if found.dtype == np.float64 else found


def _pyfunc() -> Any:
    try:
        from mlflow import pyfunc
    except ImportError:
        raise ImportError(
            "MLflow models need its client: pip install 'swiftsure[mlflow,pandas]'.", name="mlflow"
        ) from None
    return pyfunc
