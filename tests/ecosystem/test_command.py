"""``mechanic run`` with frameworks that build the optimizer inside, or wrap it."""

import pytest

from tests.cli.running import SCRIPTS, by_hand, mechanic

IMPORT = ("\nimport torch\n", "\nimport torch\nfrom mechanic.torch import Mechanic, MechanicAdamW\n")
OPTIONS = '{"lr": args.lr, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True}'
BY_HAND = {
    "hf_trainer": (
        "accelerate",  # without which the Trainer does not run
        "train_dataset=rows)",
        f"train_dataset=rows, optimizer_cls_and_kwargs=(MechanicAdamW, {OPTIONS}))",
    ),
    "accelerate_loop": (
        "accelerate",
        "torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)",
        "Mechanic(torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05))",
    ),
    "lightning_fit": (
        "lightning",
        "torch.optim.Adam(self.parameters(), lr=args.lr)",
        "Mechanic(torch.optim.Adam(self.parameters(), lr=args.lr))",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_script_trains_as_if_it_were_wrapped_by_hand_to_the_last_bit(name, tmp_path):
    package, old, new = BY_HAND[name]
    pytest.importorskip(package, reason="has an environment of its own: make test-ecosystem")
    expected = by_hand(name, IMPORT, (old, new), folder=tmp_path)
    assert expected.code == 0, expected.err
    found = mechanic("run", SCRIPTS / f"{name}.py", folder=tmp_path)
    assert found.code == 0, found.err
    # A Trainer's log has the time.
    assert found.out.splitlines()[-3:] == expected.out.splitlines()[-3:]
    assert found.err.count("mechanic: wrapped Adam") == 1
    assert "learned rate" in found.err


def test_a_probe_ends_a_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="has an environment of its own: make test-ecosystem")
    found = mechanic("run", "--probe", "12", SCRIPTS / "hf_trainer.py", folder=tmp_path)
    assert found.code == 0, found.err
    assert "final" not in found.out
    assert ", 12 steps" in found.err
    assert "torch.optim.AdamW(params, lr=" in found.err


def test_a_probe_ends_lightning(tmp_path):
    pytest.importorskip("lightning", reason="has an environment of its own: make test-ecosystem")
    found = mechanic("run", "--probe", "12", SCRIPTS / "lightning_fit.py", folder=tmp_path)
    assert found.code == 0, found.err
    assert "final" not in found.out
    assert ", 12 steps" in found.err
