"""TensorBoard and Weights & Biases get what is learned, by tuner."""

from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="has an environment of its own: make test-ecosystem")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import log_to_boards


def test_both_boards_hold_loss_scale_and_rate_of_every_tuner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log_to_boards.main()
    keys = {f"mechanic/{column}/{layer}" for column in ("scale", "learned", "lr") for layer in (0, 2)}
    keys |= {"loss", "mechanic/nonfinite_steps"}
    board = EventAccumulator("logs").Reload()
    assert set(board.Tags()["scalars"]) == keys
    for key in keys:
        assert [event.step for event in board.Scalars(key)] == [9, 19, 29, 39, 49, 59]
    log_to_boards.wandb.teardown()  # else its own process may still be writing
    (offline,) = Path("logs", "wandb").glob("offline-run-*/*.wandb")
    assert [key for key in keys if key.encode() not in offline.read_bytes()] == []
