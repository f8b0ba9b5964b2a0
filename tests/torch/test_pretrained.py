"""Networks with heads and policies in folders: saved, loaded, refused when damaged."""

import json

import pytest
import torch
from torch import nn

import swiftsure as ss
from swiftsure.torch import EarlyExit, attach_heads, collect, pretrained
from swiftsure.torch.cutting import CutModel

transformers = pytest.importorskip("transformers")

CONFIG = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40}
CONFIG |= {"intermediate_size": 24, "max_position_embeddings": 20, "num_labels": 3}


def sentences(n=40, seed=0):
    rng = torch.Generator().manual_seed(seed)
    mask = torch.ones(n, 8, dtype=torch.long)
    mask[::3, 5:] = 0
    return {"input_ids": torch.randint(2, 40, (n, 8), generator=rng), "attention_mask": mask}


def fast_bert(heads="linear"):
    torch.manual_seed(0)
    network = transformers.BertForSequenceClassification(transformers.BertConfig(**CONFIG)).eval()
    at = ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    model = attach_heads(network, at, sentences(), heads=heads)
    record = collect(model, [sentences()])
    policy = ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.1, delta=0.3)
    return EarlyExit(model, policy)


@pytest.mark.parametrize("heads", ["linear", "mlp", "copy"])
def test_a_folder_gives_the_same_answers(tmp_path, heads):
    fast = fast_bert(heads)
    fast.save_pretrained(tmp_path / "model")
    loaded = EarlyExit.from_pretrained(tmp_path / "model")
    assert loaded.policy == fast.policy
    one, two = fast(sentences(seed=1)), loaded(sentences(seed=1))
    assert torch.equal(one.exits, two.exits)
    assert torch.equal(one.outputs, two.outputs)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        own = plain.eval()(**sentences()).logits
        assert torch.equal(own, fast.model.network(**sentences()).logits)
    assert {file.suffix for file in (tmp_path / "model").iterdir()} == {
        ".json",
        ".safetensors",
        ".md",
    }


@pytest.mark.parametrize(
    "name", ["exits.json", "heads.safetensors", "policy.json", "model.safetensors", "config.json"]
)
@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_damaged_files_are_refused_in_one_line(tmp_path, name, damage):
    fast_bert().save_pretrained(tmp_path)
    file = tmp_path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + b"0" + content[middle + 1 :].replace(b"1", b"2", 1))
    with pytest.raises(ValueError, match=name) as refusal:
        EarlyExit.from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="existing folder or a repository"):
        EarlyExit.from_pretrained(tmp_path / "none")
    fast = fast_bert()
    pretrained.save(fast.model, tmp_path)
    model, policy = pretrained.load(tmp_path)
    assert policy is None
    assert not model.training
    with pytest.raises(ValueError, match="must hold a policy"):
        EarlyExit.from_pretrained(tmp_path)
    content = json.loads((tmp_path / "exits.json").read_text())
    del content["checksum"]
    content["network"] = "Trainer"
    content["checksum"] = pretrained.json_checksum(content)
    (tmp_path / "exits.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="transformers does not have"):
        pretrained.load(tmp_path)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8), 3)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.encoder(x.transpose(0, 1)).mean(dim=0))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_networks_of_your_own(tmp_path):
    torch.manual_seed(0)
    model = attach_heads(Plain().eval(), ["encoder.layers.0"], torch.randn(4, 5, 6))
    pretrained.save(model, tmp_path)
    with pytest.raises(ValueError, match="`network` must be given"):
        pretrained.load(tmp_path)
    other, _ = pretrained.load(tmp_path, network=Plain())
    x = torch.randn(3, 5, 6)
    with torch.no_grad():
        assert all(map(torch.equal, model(x), other(x)))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )


def test_traced_networks(tmp_path):
    torch.manual_seed(0)
    images = torch.randn(40, 3, 8, 8)
    model = attach_heads(convolutions().eval(), ["2"], images[:2])
    assert isinstance(model, CutModel)
    record = collect(model, [images])
    policy = ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.3, delta=0.3)
    fast = EarlyExit(model, policy)
    fast.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`network` must be given"):
        EarlyExit.from_pretrained(tmp_path)
    other = EarlyExit.from_pretrained(tmp_path, network=convolutions())
    one, two = fast(images), other(images)
    assert torch.equal(one.exits, two.exits)
    assert torch.equal(one.outputs, two.outputs)
    with pytest.raises(TypeError, match="from `attach_heads`, but got Sequential"):
        pretrained.save(convolutions(), tmp_path)


def test_the_hub_gets_and_gives_a_folder(tmp_path, monkeypatch):
    """With the Hub's client replaced by a local folder."""
    hub = pytest.importorskip("huggingface_hub")
    import shutil

    class Local:
        def create_repo(self, name, exist_ok):
            assert exist_ok
            (tmp_path / name).mkdir(parents=True)

        def upload_folder(self, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, tmp_path / repo_id, dirs_exist_ok=True)
            return commit_message

    monkeypatch.setattr(hub, "HfApi", Local)
    monkeypatch.setattr(hub, "snapshot_download", lambda name: str(tmp_path / name))
    fast = fast_bert()
    assert fast.push_to_hub("me/model", commit_message="first") == "first"
    loaded = EarlyExit.from_pretrained("me/model")
    assert torch.equal(loaded(sentences()).outputs, fast(sentences()).outputs)
