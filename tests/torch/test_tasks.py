"""Exits of networks that tag tokens, embed, answer and count, trained with labels and without."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import swiftsure as ss
from swiftsure.losses import LOSSES
from swiftsure.torch import (
    EarlyExit,
    EarlyStopping,
    absolute_error,
    attach_heads,
    check,
    collect,
    train_heads,
)
from swiftsure.torch.staged import plain_output
from tests.torch.builders import refused

transformers = pytest.importorskip("transformers")

CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "max_position_embeddings": 40,
}
AT = ["bert.encoder.layer.0", "bert.encoder.layer.2"]


def bert(kind, seed=0, **more):
    torch.manual_seed(seed)
    network = getattr(transformers, kind)(transformers.BertConfig(**CONFIG, **more)).eval()
    with torch.no_grad():  # answers that differ between samples
        for parameter in network.parameters():
            parameter.mul_(3)
    return network


def sentences(n=32, length=10, seed=0):
    rng = torch.Generator().manual_seed(seed)
    mask = torch.ones(n, length, dtype=torch.long)
    mask[1::2, 6:] = 0
    return {
        "input_ids": torch.randint(5, 50, (n, length), generator=rng),
        "attention_mask": mask,
    }


def batches(n=6, seed=0, **more):
    return [
        {**sentences(seed=seed + k), **{key: f(k) for key, f in more.items()}} for k in range(n)
    ]


class Embedder(nn.Module):
    """Mean of the last hidden states, as sentence encoders do it."""

    def __init__(self):
        super().__init__()
        self.bert = bert("BertModel")

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids, attention_mask).last_hidden_state
        weights = attention_mask[..., None].float()
        return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


NETWORKS = {
    "classification": (lambda: bert("BertForSequenceClassification", num_labels=3), "zero_one"),
    "tokens": (lambda: bert("BertForTokenClassification", num_labels=4), "token_error"),
    "answers": (lambda: bert("BertForQuestionAnswering"), "span_f1"),
    "embedding": (Embedder, "cosine"),
    "regression": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        absolute_error(-2, 2),
    ),
}


@pytest.mark.parametrize("heads", ["linear", "mlp", "copy"])
@pytest.mark.parametrize("task", NETWORKS)
def test_every_task_is_trained_without_labels_and_run(task, heads):
    make, loss = NETWORKS[task]
    network = make()
    named = None if task != "embedding" else "embedding"
    model = attach_heads(network, AT, sentences(), heads=heads, task=named)
    assert model.task.name == task
    before = copy.deepcopy(network.state_dict())
    history = train_heads(model, batches(), epochs=4, learning_rate=5e-3)
    assert history[-1]["loss"][0] < history[0]["loss"][0]
    assert history[-1]["agreement"][-1] == pytest.approx(1.0)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    check(model, sentences())

    score = "top1" if task == "classification" else "model"
    record = collect(model, batches(4, 100), losses=[loss], scores=[score])
    name = loss if isinstance(loss, str) else loss.name
    assert record.inconsistencies[name].shape == (128, 3)
    assert (record.inconsistencies[name][:, -1] == 0).all()
    assert record.inconsistencies[name][:, 0].max() > 0
    policy = ss.calibrate(record, risk="consistency", loss=name, epsilon=0.45, delta=0.2)
    out = EarlyExit(model, policy)(sentences(seed=7))
    outputs = [plain_output(output) for output in model(sentences(seed=7))]
    expected = torch.stack(outputs, dim=1)[torch.arange(32), out.exits]
    torch.testing.assert_close(out.outputs, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_learned_confidence_follows_the_agreement():
    model = attach_heads(Embedder(), AT, sentences(), task="embedding")
    train_heads(model, batches(12), epochs=8, learning_rate=1e-2)
    record = collect(model, batches(4, 100), losses=["cosine"], scores=["model"])
    found = record.confidences["model"][:, 0]
    agreement = 1 - record.inconsistencies["cosine"][:, 0]
    assert abs(found.mean() - agreement.mean()) < 0.1


# ---------------------------------------------------------------------------------------- training


def labelled(task):
    """Return batches with the labels of a rule that the network does not know."""

    def tags(k):
        ids = sentences(seed=k)["input_ids"]
        return torch.where(sentences()["attention_mask"] == 1, ids % 4, -100)

    if task == "classification":
        return batches(labels=lambda k: sentences(seed=k)["input_ids"][:, 1] % 3)
    if task == "tokens":
        return batches(labels=tags)
    if task == "answers":
        starts = lambda k: sentences(seed=k)["input_ids"][:, 1] % 3  # noqa: E731
        return batches(start_positions=starts, end_positions=lambda k: starts(k) + 2)
    return batches(labels=lambda k: sentences(seed=k)["input_ids"][:, 1] / 50)


@pytest.mark.parametrize("task", ["classification", "tokens", "answers", "regression"])
def test_heads_learn_labels(task):
    make, loss = NETWORKS[task]
    network = make()
    data = labelled(task)
    model = attach_heads(network, AT, data[0])
    history = train_heads(model, data, epochs=6, learning_rate=1e-2, distill=0.0)
    assert history[-1]["loss"][1] < 0.9 * history[0]["loss"][1]
    assert ("accuracy" in history[0]) is (task == "classification")
    score = "top1" if task == "classification" else "model"
    record = collect(model, data, losses=[loss], scores=[score])
    name = loss if isinstance(loss, str) else loss.name
    assert record.losses[name].shape == (192, 3)
    # The trained exits fit the labels better than the network, which has not seen them.
    assert record.losses[name][:, 1].mean() < record.losses[name][:, 2].mean()


def test_training_stops_early_and_keeps_the_best_heads():
    network = NETWORKS["classification"][0]()
    model = attach_heads(network, AT, sentences())
    history = train_heads(
        model,
        batches(3),
        epochs=30,
        learning_rate=5e-2,
        stop=EarlyStopping(batches(2, 50), patience=2),
    )
    losses = [float(np.mean(epoch["held_out"][:-1])) for epoch in history]
    best = int(np.argmin(losses))
    assert len(history) in (best + 3, 30)
    with torch.no_grad():
        found = []
        for batch in batches(2, 50):
            outputs = model(batch)
            teacher = outputs[-1].softmax(dim=1)
            found.append(
                [float(nn.functional.cross_entropy(output, teacher)) for output in outputs[:-1]]
            )
    assert np.mean(found) == pytest.approx(losses[best], rel=1e-4)


def test_mixed_precision():
    network = NETWORKS["classification"][0]()
    model = attach_heads(network, AT, sentences())
    history = train_heads(model, batches(), epochs=3, dtype="bfloat16")
    assert history[-1]["loss"][0] < history[0]["loss"][0]
    assert next(model.heads.parameters()).dtype == torch.float32
    with refused("dtype"):
        train_heads(model, batches(), dtype="int8")


def test_heads_without_weights_are_refused():
    network = NETWORKS["classification"][0]()
    model = attach_heads(network, AT, sentences(), heads=[First(), First()])
    with refused("model"):
        train_heads(model, batches())


class First(nn.Module):
    def forward(self, hidden):
        return hidden[:, 0, :3]


# ------------------------------------------------------------------------------------------ losses


def test_token_error_is_the_share_of_wrong_tags():
    tags = torch.tensor([[0, 1, 2, 1], [2, 2, 0, 0]])
    other = torch.tensor([[0, 1, 1, 0], [2, 0, 0, 0]])
    one, two = (5.0 * nn.functional.one_hot(t, 3).float() for t in (other, tags))
    one[1, 2:], two[1, 2:] = torch.nan, torch.nan  # padding
    on_tensors = LOSSES["token_error"].on_tensors()
    torch.testing.assert_close(
        on_tensors.against_last([one, two]).float(), torch.tensor([[0.5, 0.0], [0.5, 0.0]])
    )
    labels = torch.tensor([[0, -100, 2, 1], [0, -100, -100, -100]])
    torch.testing.assert_close(
        on_tensors.against_labels([one, two], labels).float(),
        torch.tensor([[2 / 3, 0.0], [1.0, 1.0]]),
    )


def test_span_f1_compares_tokens():
    def output(start, end, n=8):
        logits = torch.zeros(1, n, 2)
        logits[0, start, 0] = logits[0, end, 1] = 9.0
        logits[0, 7] = torch.nan
        return logits

    on_tensors = LOSSES["span_f1"].on_tensors()
    outputs = [output(0, 1), output(2, 5), output(4, 6)]
    # Two of four and three tokens are shared: F1 = 2 * 2 / 7.
    torch.testing.assert_close(
        on_tensors.against_last(outputs).float(), torch.tensor([[1.0, 1 - 4 / 7, 0.0]])
    )
    torch.testing.assert_close(
        on_tensors.against_labels(outputs, torch.tensor([[2, 5]])).float(),
        torch.tensor([[1.0, 0.0, 1 - 4 / 7]]),
    )


def test_absolute_error_stays_in_its_range():
    loss = absolute_error(1, 5)
    outputs = [torch.tensor([[0.0], [9.0]]), torch.tensor([[2.0], [4.5]])]
    torch.testing.assert_close(
        loss.on_tensors().against_last(outputs).float(), torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    )
    torch.testing.assert_close(
        loss.on_tensors().against_labels(outputs, torch.tensor([1.0, 5.0])).float(),
        torch.tensor([[0.0, 1.0], [0.0, 0.5]]),
    )


def test_cosine_is_in_the_unit_interval():
    one, two = torch.tensor([[1.0, 0.0]]), torch.tensor([[-2.0, 0.0]])
    found = LOSSES["cosine"].on_tensors().against_last([one, torch.tensor([[0.0, 3.0]]), two])
    torch.testing.assert_close(found.float(), torch.tensor([[1.0, 0.5, 0.0]]))
