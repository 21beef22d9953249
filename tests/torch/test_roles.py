"""roles(model): what the parameters of real architectures do."""

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from mechanic.roles import ROLES
from mechanic.torch import roles

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SMALL |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
OF_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 50}


def transformer(model, config, **options):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(**options))


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)
        self.downsample = nn.Conv2d(before, after, 1)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.Sequential(Residual(8, 8), Residual(8, 16))
        self.fc = nn.Linear(16, 10)


class WithLora(nn.Module):
    """As peft builds it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})


class LoraModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"fused_qkv": WithLora(nn.Linear(8, 24))}) for _ in range(2)])
        self.lm_head = WithLora(nn.Linear(8, 50))
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.ones(4, 50))})
        self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.ones(8, 4))})


def of_torch():
    """Modules of torch.nn that hold parameters themselves."""
    return nn.ModuleDict(
        {"attention": nn.MultiheadAttention(8, 2), "lstm": nn.LSTM(8, 8), "bag": nn.EmbeddingBag(9, 8)}
        | {"body": nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8)), "head": nn.Linear(8, 1)}
    )


VECTORS = ["*.bias", "*[Nn]orm*", "*ln_*"]
MODELS = {
    "ResNet": (
        ResNet,
        {"conv": ["*conv?.weight", "*.downsample.weight", "stem.weight"], "head": ["fc.weight"], "vector": ["*.bn?.*"]},
    ),
    "LoRA": (
        LoraModel,
        {
            "matrix": ["*.lora_[AB].*", "*.fused_qkv.base_layer.weight", "lora_embedding_B.*"],
            "embedding": ["lora_embedding_A.*"],
            "head": ["lm_head.base_layer.weight"],
        },
    ),
    "torch.nn": (
        of_torch,
        {
            "matrix": ["attention.*weight", "lstm.weight*", "body.0.weight"],
            "embedding": ["bag.weight"],
            "head": ["head.weight"],
            "vector": ["*.bias_?h_l0", "*.in_proj_bias", "body.1.*"],
        },
    ),
    "GPT-2": (
        lambda: transformer("GPT2LMHeadModel", "GPT2Config", **OF_GPT2, bos_token_id=1, eos_token_id=2),
        {"matrix": ["*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight"], "embedding": ["*.wte.*", "*.wpe.*"]},
    ),
    "Llama": (
        lambda: transformer("LlamaForCausalLM", "LlamaConfig", **SMALL),
        {"matrix": ["*_proj.weight"], "embedding": ["*.embed_tokens.*"], "head": ["lm_head.weight"]},
    ),
    "Llama, tied": (
        lambda: transformer("LlamaForCausalLM", "LlamaConfig", **SMALL, tie_word_embeddings=True),
        {"matrix": ["*_proj.weight"], "embedding": ["*.embed_tokens.*"]},
    ),
    "BERT": (
        lambda: transformer("BertForMaskedLM", "BertConfig", **SMALL),
        {
            "matrix": ["*.dense.weight", "*.query.weight", "*.key.weight", "*.value.weight"],
            "embedding": ["bert.embeddings.*_embeddings.weight"],
        },
    ),
    "BERT that classifies": (
        lambda: transformer("BertForSequenceClassification", "BertConfig", **SMALL),
        {
            "matrix": ["*.dense.weight", "*.query.weight", "*.key.weight", "*.value.weight"],
            "embedding": ["bert.embeddings.*_embeddings.weight"],
            "head": ["classifier.weight"],
        },
    ),
    "BERT without a head": (
        lambda: transformer("BertModel", "BertConfig", **SMALL),
        {
            "matrix": ["*.dense.weight", "*.query.weight", "*.key.weight", "*.value.weight"],
            "embedding": ["embeddings.*_embeddings.weight"],
        },
    ),
    "ViT": (
        lambda: transformer("ViTForImageClassification", "ViTConfig", **SMALL, image_size=16, patch_size=4),
        {
            "matrix": ["vit.*layer*.weight"],
            "embedding": ["*.position_embeddings", "*.projection.weight"],
            "head": ["classifier.weight"],
            "vector": ["*.cls_token"],
        },
    ),
    "T5": (
        lambda: transformer("T5ForConditionalGeneration", "T5Config", **OF_T5),
        {"matrix": ["*.[qkvo].weight", "*.w[io].weight"], "embedding": ["shared.*", "*.relative_attention_bias.*"]},
    ),
    "Mixtral": (
        lambda: transformer("MixtralForCausalLM", "MixtralConfig", **SMALL, num_local_experts=4, num_key_value_heads=2),
        {
            "matrix": ["*_proj.weight", "*.gate.weight"],
            "experts": ["*.experts.*"],
            "embedding": ["*.embed_tokens.*"],
            "head": ["lm_head.weight"],
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_the_role_that_its_place_gives_it(name):
    make, expected = MODELS[name]
    model = make()
    patterns = [("vector", each) for each in VECTORS] + [(role, each) for role in expected for each in expected[role]]
    found = roles(model)
    names = dict(model.named_parameters())
    assert {name: p for named in found.values() for name, p in named.items()} == names
    wanted = {name: next((r for r, each in patterns if fnmatchcase(name, each)), None) for name in names}
    assert {name: found.of(name) for name in names} == wanted


def test_they_print_as_a_table_with_a_star_for_the_number_of_a_layer():
    lines = str(roles(ResNet())).splitlines()
    assert lines[0].split() == ["role", "tensors", "numbers", "names"]
    assert lines[1].split() == ["conv", "7", "5,016", "stem.weight"]
    assert "blocks.*.conv1.weight (2)" in lines[2]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["role", "conv", "head", "vector"]
    assert list(ROLES) == list(roles(ResNet()))
    assert len(roles(ResNet())) == len(ROLES)


def test_patterns_of_names_give_other_roles_and_the_first_that_fits_is_taken():
    found = roles(ResNet(), {"stem.*": "vector", "*conv1.weight": "embedding", "*conv?.weight": "other"})
    assert found.of("stem.weight") == found.of("stem.bias") == "vector"
    assert found.of("blocks.0.conv1.weight") == "embedding"
    assert found.of("blocks.0.conv2.weight") == "other"


def test_a_tied_parameter_is_known_by_all_its_names():
    model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 9, bias=False)})
    model["lm_head"].weight = model["wte"].weight
    assert roles(model, {"lm_head.weight": "head"}).of("wte.weight") == "head"


def test_a_pattern_that_fits_nothing_or_a_role_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"fits 'stemm\.\*'"):
        roles(ResNet(), {"stemm.*": "vector"})
    with pytest.raises(ValueError, match="'bias', which is none of"):
        roles(ResNet(), {"stem.*": "bias"})


def test_what_fits_nowhere_is_named():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_log = nn.Parameter(torch.ones(4, 3))
            self.linear = nn.Linear(4, 3)

    model = nn.ModuleList([Mixer(), Mixer()])
    assert list(roles(model)["other"]) == ["0.a_log", "1.a_log"]
    assert list(roles(model)["matrix"]) == ["0.linear.weight", "1.linear.weight"]


def test_names_tell_what_modules_leave_open():
    class Given(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.p = nn.Parameter(torch.ones(shape))

    names = {"wpe": (9, 4), "patch_embed": (9, 4), "moe": (2, 3, 4), "pos_ffn": (9, 4), "score": (9, 4)}
    found = roles(nn.ModuleDict({name: Given(*shape) for name, shape in names.items()}))
    expected = {"embedding": ["wpe.p", "patch_embed.p"], "experts": ["moe.p"], "other": ["pos_ffn.p", "score.p"]}
    assert {role: list(named) for role, named in found.items() if named} == expected


def test_a_matrix_of_one_row_is_a_vector_but_in_a_head():
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 1))
    assert list(roles(model)["vector"]) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias"]
    assert list(roles(model)["head"]) == ["2.weight"]


def test_what_cannot_be_trained_is_left_out_and_what_has_no_shape_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    assert [name for named in roles(model).values() for name in named] == ["1.weight", "0.bias", "1.bias"]
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        roles(nn.Sequential(nn.LazyLinear(4)))
