"""Fingerprints: one for what is run, however it is wrapped, and another for anything else."""

import copy

import pytest
import torch
from torch import nn

from swiftsure.torch import fingerprint
from swiftsure.torch.cutting import cut
from swiftsure_zoo import UViT
from tests.torch.builders import network


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5, bias=False)
    ).eval()


PLAIN = net()


def test_the_same_model_has_the_same():
    assert fingerprint(net()) == fingerprint(PLAIN)
    assert fingerprint(copy.deepcopy(PLAIN)) == fingerprint(PLAIN)
    assert fingerprint(PLAIN).startswith("sha256:")
    assert len(fingerprint(PLAIN)) == len("sha256:") + 64


def test_it_is_the_same_in_another_process_and_year():
    """Policies outlive the version that made them."""
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.5]]))
        layer.bias.zero_()
    expected = "sha256:95d2fe570b24640aa0acef8e66e49465cd7f6ad3bb853c8c4fdb25e963631811"
    assert fingerprint(layer) == expected


class Wrapper(nn.Module):
    """What data-parallel wrappers look like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        Wrapper,
        compiled,
        lambda model: Wrapper(compiled(model)),
        lambda model: compiled(Wrapper(model)),
        lambda model: Wrapper(Wrapper(model)),
    ],
)
def test_wrapping_does_not_matter(wrap):
    assert fingerprint(wrap(net())) == fingerprint(PLAIN)


def test_compiled_parts_do_not_matter():
    model = net()
    model[0] = compiled(model[0])
    assert fingerprint(model) == fingerprint(PLAIN)


def test_layout_in_memory_does_not_matter():
    model = net().to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert fingerprint(model) == fingerprint(PLAIN)
    model = net()
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    assert not model[3].weight.is_contiguous()
    assert fingerprint(model) == fingerprint(PLAIN)


def test_modes_and_gradients_do_not_matter():
    model = net().train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert fingerprint(model) == fingerprint(PLAIN)


def test_a_loaded_state_does_not_matter(tmp_path):
    torch.save(PLAIN.state_dict(), tmp_path / "state.pt")
    model = net()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert fingerprint(model) == fingerprint(PLAIN)


def test_every_value_matters():
    for name in PLAIN.state_dict():
        model = net()
        value = model.state_dict()[name].view(-1)
        place = len(value) // 2
        if value.is_floating_point():
            value[place] = torch.nextafter(value[place], torch.tensor(9.0))
        else:
            value[place] += 1
        assert fingerprint(model) != fingerprint(PLAIN), name


def test_names_matter():
    def named(name):
        holder = nn.Module()
        holder.register_parameter(name, nn.Parameter(torch.ones(2)))
        return fingerprint(holder)

    assert len({named("a"), named("b"), named("ab")}) == 3


def test_shapes_matter():
    def shaped(*shape):
        holder = nn.Module()
        holder.register_buffer("a", torch.ones(shape))
        return fingerprint(holder)

    assert len({shaped(6), shaped(2, 3), shaped(3, 2), shaped(1, 6), shaped(6, 0)}) == 5


def test_dtypes_of_weights_matter():
    assert fingerprint(net().bfloat16()) != fingerprint(PLAIN)
    assert fingerprint(net().double()) != fingerprint(PLAIN)
    holders = []
    for value in (torch.zeros(2), torch.zeros(2, dtype=torch.int32)):  # the same bytes
        holder = nn.Module()
        holder.register_buffer("a", value)
        holders.append(fingerprint(holder))
    assert holders[0] != holders[1]


def test_which_weight_is_where_matters():
    model = network()
    swapped = copy.deepcopy(model)
    swapped.heads[0], swapped.heads[1] = swapped.heads[1], swapped.heads[0]
    assert fingerprint(swapped) != fingerprint(model)


@pytest.mark.parametrize(
    "run",
    [
        {"temperatures": (1.0, 2.0)},
        {"temperatures": (2.0, 1.0)},
        {"temperatures": (1.0,)},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"temperatures": (1.0, 2.0), "dtype": "bfloat16"},
    ],
)
def test_how_it_is_run_matters(run):
    assert fingerprint(PLAIN, **run) != fingerprint(PLAIN)
    assert fingerprint(PLAIN, **run) == fingerprint(PLAIN, **run)


def test_ways_to_run_differ_from_each_other():
    ways = [
        {},
        {"temperatures": (1.0, 2.0)},
        {"temperatures": (1.0, 2.0), "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
    ]
    assert len({fingerprint(PLAIN, **way) for way in ways}) == len(ways)


def test_tensors_of_any_kind():
    holder = nn.Module()
    for i, value in enumerate(
        [
            torch.tensor(True),
            torch.zeros(0, 3),
            torch.tensor([1 + 2j]),
            torch.zeros(2, dtype=torch.bfloat16),
            torch.tensor(3),
        ]
    ):
        holder.register_buffer(f"b{i}", value)
    before = fingerprint(holder)
    holder.b2 = torch.tensor([1 + 3j])
    assert fingerprint(holder) != before


class Called(nn.Module):
    """A layer that is called `module` beside weights of the same names as that layer's."""

    def __init__(self, inner, outer):
        super().__init__()
        self.module = nn.Linear(1, 1)
        self.weight = nn.Parameter(torch.full((1, 1), outer))
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.constant_(self.module.weight, inner)
        nn.init.zeros_(self.module.bias)


def test_a_layer_that_is_called_module_hides_nothing():
    models = [Called(1.0, 2.0), Called(1.0, 3.0), Called(4.0, 2.0)]
    assert len({fingerprint(model) for model in models}) == 3


def test_a_network_whose_only_layer_is_called_module():
    plain = Wrapper(net())
    assert fingerprint(Wrapper(plain)) == fingerprint(plain)


def test_buffers_that_are_not_saved_matter():
    """They change what the model answers just as well."""

    def with_table(value):
        holder = nn.Module()
        holder.register_buffer("table", torch.full((2,), value), persistent=False)
        return fingerprint(holder)

    assert with_table(1.0) != with_table(2.0)


def test_a_cut_network_has_one_for_network_and_heads():
    def model():
        return cut(net(), ["1"], [nn.Sequential(nn.Flatten(), nn.Linear(16, 5))]).eval()

    torch.manual_seed(1)
    one = model()
    torch.manual_seed(1)
    assert fingerprint(model()) == fingerprint(one)
    with torch.no_grad():
        one.heads[0][1].bias += 1
    torch.manual_seed(1)
    assert fingerprint(model()) != fingerprint(one)


# ---------------------------------------------------------------------------------- configuration


def attention(n_heads, **options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, n_heads, **options)


def test_the_number_of_attention_heads_matters():
    """The same tensors compute something else."""
    assert attention(2).state_dict().keys() == attention(4).state_dict().keys()
    assert fingerprint(attention(2)) != fingerprint(attention(4))
    models = []
    for n_heads in (2, 4):
        torch.manual_seed(0)
        models.append(UViT(image_size=8, width=16, depth=2, n_heads=n_heads).eval())
    assert len({fingerprint(model) for model in models}) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Conv2d(3, 4, 3, stride=1), nn.Conv2d(3, 4, 3, stride=2)),
        (nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, padding_mode="reflect", padding=1)),
        (nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-3)),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())),
        (nn.Softmax(dim=1), nn.Softmax(dim=2)),
    ],
)
def test_hyperparameters_matter(one, other):
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (attention(2), attention(2, dropout=0.5)),
        (nn.Dropout(0.1), nn.Dropout(0.5)),
        (nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=0.5)),
        (nn.ReLU(), nn.ReLU(inplace=True)),
    ],
)
def test_what_only_training_uses_does_not_matter(one, other):
    assert fingerprint(one) == fingerprint(other)


class Counting(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.calls, self.seen = scale, 0, []

    def set_scale(self, scale):
        self.scale = scale

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return self.scale * x


def test_counters_do_not_matter():
    """A model must keep its fingerprint while it runs."""
    model = Counting(2)
    before = fingerprint(model)
    model(torch.zeros(3))
    assert fingerprint(model) == before
    model.set_scale(3)
    assert fingerprint(model) == fingerprint(Counting(3)) != before


def test_a_hugging_face_configuration_matters():
    transformers = pytest.importorskip("transformers")

    def llama(**options):
        sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, **options)
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()

    plain = llama(num_attention_heads=4)
    assert fingerprint(llama(num_attention_heads=4)) == fingerprint(plain)
    assert fingerprint(llama(num_attention_heads=4, rms_norm_eps=1e-3)) != fingerprint(plain)
    assert fingerprint(llama(num_attention_heads=4, attention_dropout=0.1)) == fingerprint(plain)
    other = llama(num_attention_heads=4)
    other.config._name_or_path, other.config.use_cache = "elsewhere", False
    assert fingerprint(other) == fingerprint(plain)
