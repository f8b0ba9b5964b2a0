"""Configurations of vLLM's semantic-router, checked by its own package."""

import math

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import swiftsure as ss
from swiftsure.cascade.semantic_router import (
    router_threshold,
    semantic_router_config,
    write_semantic_router,
)

PARAMETERS = {"temperature": 0, "max_tokens": 5}


def endpoint(name, price, **more):
    return ss.Endpoint(
        f"https://{name}.example/v1",
        name,
        key=f"{name.upper()}_KEY",
        per_million=(price, price),
        parameters=PARAMETERS,
        **more,
    )


def cascade_of(*names, score="mean_logprob", **more):
    return ss.Cascade([endpoint(name, 1 + k, **more) for k, name in enumerate(names)], scores=score)


def certified(cascade, sure=0.8, n=400, score="mean_logprob"):
    """Return a policy that accepts answers from about `sure`, which are right."""
    rng = np.random.default_rng(0)
    exits = len(cascade.models) - 1
    confidences = rng.random((n, exits))
    apart = np.hstack([confidences < sure, np.zeros((n, 1), bool)])
    record = ss.ExitRecord(
        {score: confidences},
        inconsistencies={"exact_match": apart},
        costs={"usd": np.cumsum([0.1] * exits + [1.0])},
        full_costs={"usd": 1.0},
        fingerprint=cascade.fingerprint,
    )
    promise = ss.Promise("exact_match", risk="consistency", epsilon=0.05)
    return ss.Calibration(promise, rule=score).run(record)


@pytest.fixture(scope="module")
def made():
    cascade = cascade_of("small", "large")
    return cascade, certified(cascade)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of click, in vllm-sr
def test_the_routers_own_package_accepts_the_file(made, tmp_path):
    main = pytest.importorskip("cli.main", reason="vllm-sr is not installed").main
    path = tmp_path / "config.yaml"
    write_semantic_router(path, *made)
    command = ["config", "validate", "--config", str(path)]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 0, found.output
    assert "Configuration is valid" in found.output
    broken = yaml.safe_load(path.read_text())
    broken["routing"]["decisions"][0]["modelRefs"][0]["model"] = "nobody"
    path.write_text(yaml.safe_dump(broken))
    assert CliRunner().invoke(main, command).exit_code != 0


def test_its_models_read_the_cascade(made, tmp_path):
    parser = pytest.importorskip("cli.parser", reason="vllm-sr is not installed")
    path = tmp_path / "config.yaml"
    write_semantic_router(path, *made)
    (decision,) = parser.parse_user_config(str(path)).routing.decisions
    assert [each.model for each in decision.modelRefs] == ["small", "large"]
    confidence = decision.algorithm.confidence
    assert confidence.confidence_method == "avg_logprob"
    assert confidence.on_error == "fail"
    assert 0 < confidence.threshold <= 1


def test_the_router_accepts_exactly_what_the_policy_does(made):
    cascade, policy = made
    config = semantic_router_config(cascade, policy)
    level = config["routing"]["decisions"][0]["algorithm"]["confidence"]["threshold"]
    runner = cascade.run(policy)
    for mean in -np.random.default_rng(1).exponential(0.3, 2000):
        accepted = min(max((mean + 3.0) / 3.0, 0.0), 1.0) >= level  # as the router computes it
        assert accepted == runner.leaves(0, math.exp(mean))


def test_the_certificate_comes_with_it(made):
    cascade, policy = made
    config = semantic_router_config(cascade, policy, name="questions")
    decision = config["routing"]["decisions"][0]
    about = decision["annotations"]["swiftsure"]
    assert decision["name"] == "questions"
    assert about["certificate"] == str(policy)
    assert ss.Policy.model_validate(about["policy"]) == policy
    assert about["parameters"]["small"] == PARAMETERS
    backend = config["providers"]["models"][0]["backend_refs"][0]
    assert backend["api_key_env"] == "SMALL_KEY"
    assert config["providers"]["models"][0]["pricing"]["prompt_per_1m"] == 1


def test_a_policy_that_certifies_nothing_asks_the_last_model_alone():
    cascade = cascade_of("small", "large")
    config = semantic_router_config(cascade, certified(cascade, sure=2.0))
    decision = config["routing"]["decisions"][0]
    assert decision["modelRefs"] == [{"model": "large"}]
    assert "algorithm" not in decision


def test_three_models_share_one_threshold():
    cascade = cascade_of("tiny", "small", "large")
    config = semantic_router_config(cascade, certified(cascade))
    assert len(config["routing"]["decisions"][0]["modelRefs"]) == 3


def test_what_the_router_cannot_do_is_refused(made):
    cascade = cascade_of("small", "large", system="One word.")
    with pytest.raises(ValueError, match="chat endpoints without"):
        semantic_router_config(cascade, certified(cascade))
    cascade = cascade_of("small", "large", score="min_logprob")
    with pytest.raises(ValueError, match="decides by 'min_logprob'"):
        semantic_router_config(cascade, certified(cascade, score="min_logprob"))
    other = cascade_of("other", "large")
    with pytest.raises(ValueError, match=r"fingerprint|other"):
        semantic_router_config(other, made[1])
    for level in (0.0, 0.01, math.exp(-3.0)):
        with pytest.raises(ValueError, match=r"thresholds above exp\(-3\)"):
            router_threshold(level)
    assert router_threshold(1.0) == 1.0
