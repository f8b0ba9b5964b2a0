"""Policies in MLflow, with its small client and a store of local files."""

import builtins

import pytest

import swiftsure as ss
from tests.builders import random_record

PROMISES = [
    ss.Promise("zero_one", epsilon=0.1),
    ss.Promise("brier", risk="consistency", epsilon=0.2),
]


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    found = pytest.importorskip("mlflow", reason="needs pip install 'swiftsure[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    before = found.get_tracking_uri()
    found.set_tracking_uri(tmp_path.joinpath("runs").as_uri())
    yield found
    while found.active_run() is not None:
        found.end_run()
    found.set_tracking_uri(before)


@pytest.fixture
def policy():
    return ss.calibrate(random_record(1000), loss="brier", epsilon=0.1)


def test_a_policy_is_logged_and_fetched_again(mlflow, policy, tmp_path):
    run_id = policy.log_to_mlflow()
    assert mlflow.active_run() is None
    run = mlflow.get_run(run_id)
    promise = policy.certificate.promises[0]
    assert run.info.status == "FINISHED"
    assert run.data.params["epsilon"] == "0.1"
    assert run.data.params["loss"] == "brier"
    assert float(run.data.params["setting.threshold"]) == policy.threshold
    assert run.data.metrics["calibration_risk"] == promise.calibration_risk
    assert run.data.metrics["upper_bound"] == promise.upper_bound
    full, here = policy.certificate.costs.means["exit"]
    assert run.data.metrics["saving.exit"] == 1 - here / full
    assert run.data.tags["swiftsure.promise"] == str(policy)
    fetched = mlflow.artifacts.download_artifacts(
        run_id=run_id, artifact_path="policy.json", dst_path=str(tmp_path / "fetched")
    )
    assert ss.Policy.load(fetched) == policy


def test_several_policies_go_to_the_active_run(mlflow, policy):
    both = ss.calibrate(random_record(1000), PROMISES)
    with mlflow.start_run() as run:
        assert policy.log_to_mlflow() == run.info.run_id
        both.log_to_mlflow(prefix="both.", artifact="more/both.json")
        assert mlflow.active_run() is not None
    logged = mlflow.get_run(run.info.run_id).data
    assert logged.params["both.loss.2"] == "brier"
    assert logged.params["both.epsilon.1"] == "0.1"
    assert logged.metrics["both.calibration_risk.1"] >= 0
    names = [each.path for each in mlflow.MlflowClient().list_artifacts(run.info.run_id, "more")]
    assert names == ["more/both.json"]


def test_a_missing_client_names_the_install_command(policy, monkeypatch):
    imported = builtins.__import__

    def refuse(name, *args):
        if name == "mlflow":
            raise ImportError(name)
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'swiftsure\[mlflow\]'"):
        policy.log_to_mlflow()
