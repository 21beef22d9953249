"""MechanicMuon: Muon for the matrices, AdamW for the rest, and no learning rates."""

import copy

import pytest
import pytorch_optimizer
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import Mechanic, MechanicMuon, Together, roles
from tests.torch.muon_parallel import groups_for
from tests.torch.task import same_bits, snapshot

pytestmark = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has Muon from 2.9 on")

VOCABULARY, LENGTH, WIDTH = 17, 12, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def tokens(step, size=16):
    """Sequences where each token follows from the one before it, but for one in ten."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    noise = torch.rand(found.shape, generator=generator) < 0.1
    for i in range(1, LENGTH + 1):
        found[:, i] = torch.where(noise[:, i], found[:, i], (3 * found[:, i - 1] + 1) % VOCABULARY)
    return found


def loss_of(model, step, size=16):
    batch = tokens(step, size)
    return cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def train(model, optimizer, steps, first=0, schedule=None):
    """Returns the loss over many batches."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    with torch.no_grad():
        return loss_of(model, 10_000, 512).item()


def run(lr=1.0, steps=40, **options):
    model = GPT()
    optimizer = MechanicMuon(model, lr, **options)
    return train(model, optimizer, steps, schedule=CosineAnnealingLR(optimizer, steps)), optimizer


@pytest.mark.long
@pytest.mark.parametrize("tuners", ["one", "role"])
def test_it_trains_alike_with_every_learning_rate(tuners):
    losses = []
    for lr in (1e-4, 1.0, 1e4):
        loss, optimizer = run(lr, tuners=tuners)
        losses.append(loss)
        assert all(scale > 0 for scale in optimizer.scales().values())
    assert max(losses) < 1.0  # from 3.0; 0.6 is left by the noise
    assert max(losses) / min(losses) < 1.01


@pytest.mark.long
def test_where_tuners_are_apart_so_can_the_learning_rates_be():
    losses = []
    for lr_muon, lr_adamw in ((1.0, 1.0), (1e-4, 1e4), (1e4, 1e-4)):
        model = GPT()
        found = roles(model)
        matrices = list(found["matrix"].values())
        rest = [p for role, named in found.items() if role != "matrix" for p in named.values()]
        muon = optim.Muon(matrices, lr=lr_muon, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        optimizer = Mechanic(Together(muon, optim.AdamW(rest, lr=lr_adamw)), per_group=True)
        losses.append(train(model, optimizer, 25, schedule=CosineAnnealingLR(optimizer, 25)))
    assert max(losses) / min(losses) < 1.01


def test_it_is_the_pair_written_out():
    model, twin = GPT(), GPT()
    optimizer = MechanicMuon(model, weight_decay=0.1)
    found = roles(twin)
    muon = optim.Muon(found["matrix"].values(), lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": list(named.values())} for role, named in found.items() if role != "matrix" and named]
    pair = Mechanic(Together(muon, optim.AdamW(groups, lr=1.0, weight_decay=0.1)))
    for each, other in ((model, optimizer), (twin, pair)):
        train(each, other, 5)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, pair))


def test_every_role_has_a_group_and_if_asked_for_a_tuner():
    expected = [("Muon", "matrix"), ("AdamW", "embedding"), ("AdamW", "head"), ("AdamW", "vector")]
    for tuners, names in (("one", ["default"]), ("role", ["matrix", "embedding", "head", "vector"])):
        optimizer = MechanicMuon(GPT(), tuners=tuners)
        assert [(group["optimizer"], group["role"]) for group in optimizer.param_groups] == expected
        assert list(optimizer.scales()) == names
    matrix, *rest = optimizer.param_groups
    assert len(matrix["params"]) == 8
    assert {group["weight_decay"] for group in (matrix, *rest)} == {0.01}


def test_options_go_to_their_optimizer():
    names = {"momentum": 0.9, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}
    optimizer = MechanicMuon(GPT(), weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6, **names, config={"decay": 0.1})
    matrix, *rest = optimizer.param_groups
    assert {key: matrix[key] for key in names} == names
    assert {(group["betas"], group["eps"]) for group in rest} == {((0.8, 0.9), 1e-6)}
    assert optimizer.config.decay == 0.1


@pytest.mark.long
def test_it_resumes_by_the_names_of_parameters():
    state_dicts = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = GPT()
    optimizer = MechanicMuon(model, tuners="role")
    train(model, optimizer, 5)
    options = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True)
    saved = copy.deepcopy(state_dicts.get_optimizer_state_dict(model, optimizer, options=options))
    assert "state.blocks.0.qkv.weight.momentum_buffer" in saved
    again = copy.deepcopy(model)
    resumed = MechanicMuon(again, tuners="role")
    state_dicts.set_optimizer_state_dict(again, resumed, saved, options=options)
    for each, other in ((model, optimizer), (again, resumed)):
        train(each, other, 5, first=5)
    assert same_bits(snapshot(model, optimizer), snapshot(again, resumed))


def test_released_it_is_the_pair_at_what_every_role_has_learned():
    model = GPT()
    optimizer = MechanicMuon(model, 0.1, tuners="role")
    train(model, optimizer, 10)
    scales, released = optimizer.scales(), optimizer.release()
    assert [type(member) for member in released.members] == [optim.Muon, optim.AdamW]
    assert {group["role"]: group["lr"] for group in released.param_groups} == pytest.approx(scales)
    train(model, released, 5, first=10)


@pytest.mark.long
def test_bfloat16_parameters_train_as_float32_ones_do():
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = GPT().to(dtype)
        optimizer = MechanicMuon(model)
        losses.append(train(model, optimizer, 40, schedule=CosineAnnealingLR(optimizer, 40)))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert {state["momentum_buffer"].dtype for state in optimizer.base.members[0].state.values()} == {torch.float32}


def test_roles_can_be_given():
    found = MechanicMuon(GPT(), roles={"*.qkv.weight": "vector"}).param_groups
    assert [len(group["params"]) for group in found if group["role"] == "matrix"] == [6]
    model = GPT()
    again = MechanicMuon(model, roles=roles(model, {"*.qkv.weight": "vector"})).param_groups
    assert [len(group["params"]) for group in again] == [len(group["params"]) for group in found]


def test_what_muon_cannot_take_is_refused_with_what_to_do():
    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.table = nn.Parameter(torch.ones(2, 3, 4))

    with pytest.raises(ValueError, match=r"not known: 0\.table; .*roles=\{'0\.table': 'vector'\}"):
        MechanicMuon(nn.Sequential(Odd(), nn.Linear(4, 4)))
    with_frozen = nn.Sequential(Odd(), nn.Linear(4, 4), nn.Linear(4, 4))
    with_frozen[0].table.requires_grad_(False)
    assert len(MechanicMuon(with_frozen).param_groups[0]["params"]) == 2
    with pytest.raises(ValueError, match=r"0\.table has 3 dimensions"):
        MechanicMuon(nn.Sequential(Odd(), nn.Linear(4, 4)), roles={"0.table": "matrix"})
    with pytest.raises(ValueError, match=r"0\.bias has 1 dimensions, which Muon does not take"):
        MechanicMuon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), roles={"0.bias": "matrix"})
    with pytest.raises(ValueError, match=r"0\.weight has complex numbers"):
        MechanicMuon(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"another model: they lack wte\.weight"):
        MechanicMuon(GPT(), roles=roles(GPT()))
    with pytest.raises(ValueError, match="no matrices"):
        MechanicMuon(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 10)))
    with pytest.raises(TypeError, match="takes the model"):
        MechanicMuon(GPT().parameters())
    with pytest.raises(ValueError, match="'one' or 'role'"):
        MechanicMuon(GPT(), tuners="layer")


def test_matrices_alone_need_no_adamw():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert [group["optimizer"] for group in MechanicMuon(model, roles={"*": "matrix"}).param_groups] == ["Muon"]


def test_an_older_torch_is_told(monkeypatch):
    monkeypatch.delattr(optim, "Muon")
    with pytest.raises(RuntimeError, match=r"from 2\.9 on"):
        MechanicMuon(GPT())


@pytest.mark.long
@pytest.mark.parametrize("name", ["Muon", "AdaMuon", "NorMuon", "AdaGO", "MuonClip"])
def test_other_muons_train_with_every_learning_rate_and_resume(name):
    """Those of pytorch_optimizer, which have an AdamW of their own."""

    def build(model, lr):
        return Mechanic(getattr(pytorch_optimizer, name)([{**group, "lr": lr} for group in groups_for(model)]))

    losses = []
    for lr in (1e-3, 1e3):
        model = GPT()
        optimizer = build(model, lr)
        losses.append(train(model, optimizer, 25, schedule=CosineAnnealingLR(optimizer, 25)))
    assert max(losses) < 2.0  # from 3.0
    assert max(losses) / min(losses) < 1.01
    again = copy.deepcopy(model)
    resumed = build(again, 3.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, other in ((model, optimizer), (again, resumed)):
        train(each, other, 3, first=25)
    assert same_bits(snapshot(model, optimizer), snapshot(again, resumed))
