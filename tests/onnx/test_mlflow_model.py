"""Certified models as MLflow models."""

import numpy as np
import pytest

pytest.importorskip("pandas")
pytest.importorskip("mlflow.pyfunc")

import pandas as pd
from mlflow import pyfunc

import swiftsure.mlflow as flavour
from swiftsure.onnx import EarlyExit
from tests.torch.builders import inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


@pytest.fixture(scope="module")
def saved(exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("mlflow") / "model"
    flavour.save_model(exported, path)
    return path


def test_a_loaded_model_answers_as_the_folder(saved, exported):
    batch = inputs(30).numpy()
    found = pyfunc.load_model(str(saved)).predict(batch)
    out = EarlyExit.load(exported)(batch)
    assert found["prediction"].tolist() == out.predictions.tolist()
    assert found["exit"].tolist() == out.exits.tolist()
    assert len(set(found["exit"])) > 1


def test_a_column_of_lists_is_the_only_input(saved):
    batch = inputs(20).numpy()
    frame = pd.DataFrame({"pixels": [each.tolist() for each in batch.astype(np.float64)]})
    model = pyfunc.load_model(str(saved))
    assert model.predict(frame).equals(model.predict(batch))


def test_the_promise_is_metadata(saved, policy):
    told = pyfunc.load_model(str(saved)).metadata
    assert told.metadata["swiftsure.promise"] == str(policy).splitlines()[0]
    assert told.flavors["python_function"]["loader_module"] == "swiftsure.mlflow"


def test_a_folder_without_a_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no policy\.json"):
        flavour.save_model(tmp_path, tmp_path / "model")
