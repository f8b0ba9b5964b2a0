"""Logs a policy to MLflow, where its figures can be compared and its file fetched again."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftsure.certify.policy import Policy

__all__ = ["log_to_mlflow"]

MOST_TEXT = 5000
"""Characters that MLflow keeps of a tag."""


def log_to_mlflow(policy: "Policy", *, prefix: str = "", artifact: str = "policy.json") -> str:
    """Log a policy to the active MLflow run, or to a new one; return the id of the run.

    Parameters
    ----------
    policy : Policy
    prefix : str
        Put before every name, if a run logs several policies.
    artifact : str
        Name of the policy's file among the artifacts of the run.
    """
    try:
        import mlflow
    except ImportError:
        raise ImportError(
            "Logging to MLflow needs its client: pip install 'swiftsure[mlflow]'.", name="mlflow"
        ) from None

    started = mlflow.active_run() is None
    run = mlflow.active_run() or mlflow.start_run()
    try:
        mlflow.log_params({prefix + name: value for name, value in parameters(policy).items()})
        mlflow.log_metrics({prefix + name: value for name, value in metrics(policy).items()})
        mlflow.set_tags({prefix + name: value for name, value in tags(policy).items()})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(artifact).name
            policy.save(path)
            parent = Path(artifact).parent.as_posix()
            mlflow.log_artifact(str(path), None if parent == "." else parent)
    finally:
        if started:
            mlflow.end_run()
    return str(run.info.run_id)


def parameters(policy: "Policy") -> dict[str, Any]:
    """Return what was fixed before the calibration, and the settings that it chose."""
    certificate = policy.certificate
    fixed: dict[str, Any] = {
        "control": certificate.control,
        "delta": certificate.delta,
        "n": certificate.samples.n,
        "path": certificate.path,
        "seed": certificate.provenance.seed,
        "score": policy.score,
        **certificate.options,
    }
    for promise, end in zip(certificate.promises, _ends(policy), strict=True):
        fixed |= {f"{name}{end}": getattr(promise, name) for name in ("risk", "loss", "epsilon")}
        fixed[f"bound{end}"] = promise.bound
    return fixed | {f"setting.{name}": value for name, value in policy.settings.items()}


def metrics(policy: "Policy") -> dict[str, float]:
    """Return what the calibration measured: risks, their upper bounds, and savings."""
    certificate = policy.certificate
    found: dict[str, float | None] = {"certified": float(not policy.runs_full_model)}
    for promise, end in zip(certificate.promises, _ends(policy), strict=True):
        found[f"calibration_risk{end}"] = promise.calibration_risk
        found[f"upper_bound{end}"] = promise.upper_bound
    for name, (full, here) in certificate.costs.means.items():
        found[f"cost.{name}"] = here
        found[f"saving.{name}"] = 1 - here / full if full else None
    for exit_, share in enumerate(certificate.costs.exit_shares or ()):
        found[f"exit_share.{exit_ + 1}"] = share
    return {name: value for name, value in found.items() if value is not None}


def tags(policy: "Policy") -> dict[str, str]:
    """Return the promise in words, and what identifies the model and the calibration data."""
    certificate = policy.certificate
    found = {
        "swiftsure.promise": str(policy)[:MOST_TEXT],
        "swiftsure.guarantee": certificate.guarantee,
        "swiftsure.data": certificate.provenance.data,
        "swiftsure.model": certificate.provenance.model,
    }
    return {name: value for name, value in found.items() if value is not None}


def _ends(policy: "Policy") -> list[str]:
    """Return what is put after the names of each promise: nothing, if there is only one."""
    promises = policy.certificate.promises
    return [""] if len(promises) == 1 else [f".{k + 1}" for k in range(len(promises))]
