"""PEFT: LoRA adapters, tuned apart."""

import pytest
import torch

pytest.importorskip("peft", reason="has an environment of its own: make test-ecosystem")
import lora
from mechanic.torch import Mechanic
from tests.torch.task import same_bits, snapshot


@pytest.fixture(scope="module")
def pretrained():
    return lora.pretrained()


@pytest.fixture(scope="module")
def gain_of_adamw(pretrained):
    """In 300 steps at the best of four learning rates."""
    gains = []
    for lr in (3e-3, 1e-2, 3e-2, 1e-1):
        model, _ = lora.adapted(pretrained)
        trained = [p for p in model.parameters() if p.requires_grad]
        gains.append(gain(model, torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)))
        model.unload()
    return max(gains)


def gain(model, optimizer):
    start = loss_on_all(model)
    lora.train(model, optimizer, lora.CODE, steps=300)
    return start - loss_on_all(model)


@torch.no_grad()
def loss_on_all(model):
    pieces = torch.tensor(list(lora.CODE.encode())).unfold(0, lora.LENGTH, lora.LENGTH)
    return model(input_ids=pieces, labels=pieces).loss.item()


def test_adapters_learn_with_a_scale_per_group_and_the_rest_stays_frozen(pretrained, gain_of_adamw):
    before = {name: p.detach().clone() for name, p in pretrained.named_parameters()}
    model, optimizer = lora.adapted(pretrained)
    assert gain(model, optimizer) > gain_of_adamw / 2
    scales = optimizer.scales()
    assert set(scales) == {"attention", "feed-forward"}
    assert all(scale > 0 for scale in scales.values())
    assert scales["attention"] != scales["feed-forward"]
    for name, p in model.unload().named_parameters():
        assert p.equal(before[name])


def test_a_group_of_adapters_that_start_at_zero_learns_too(pretrained, gain_of_adamw):
    """LoRA's B starts at zero, so there is no |x_1| to take a fraction of."""
    model, _ = lora.adapted(pretrained)
    groups = [
        {"params": [p for name, p in model.named_parameters() if f"lora_{part}" in name], "tuner": part}
        for part in ("A", "B")
    ]
    assert not any(p.any() for p in groups[1]["params"])
    optimizer = Mechanic(torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0))
    assert gain(model, optimizer) > gain_of_adamw / 2
    model.unload()
    assert all(scale > 1e-5 for scale in optimizer.scales().values())


def test_adapters_and_optimizer_resume_bit_for_bit(pretrained, tmp_path):
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, optimizer = lora.adapted(pretrained)
    lora.train(model, optimizer, lora.CODE, steps=10)
    torch.save([get_peft_model_state_dict(model), optimizer.state_dict()], tmp_path / "adapters.pt")
    lora.train(model, optimizer, lora.CODE, steps=10)
    expected = snapshot(model, optimizer)
    model.unload()

    model, optimizer = lora.adapted(pretrained)
    adapters, state = torch.load(tmp_path / "adapters.pt")
    set_peft_model_state_dict(model, adapters)
    optimizer.load_state_dict(state)
    lora.train(model, optimizer, lora.CODE, steps=10)
    assert same_bits(expected, snapshot(model, optimizer))
    model.unload()
