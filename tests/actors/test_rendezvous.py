"""The port where ranks meet, from the moment it is chosen until rank 0 listens there."""

import socket

import pytest

from qarl_openrlhf.actors.model_workers import CriticModelActor, ReferenceModelActor, RewardModelActor
from qarl_openrlhf.actors.policy import QarlPolicyActor


@pytest.mark.parametrize("actor_class", [QarlPolicyActor, ReferenceModelActor, RewardModelActor, CriticModelActor])
def test_nobody_gets_the_port_before_rank_0_listens(actor_class, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    actor = actor_class(1, 0, "127.0.0.1", None)
    _, port = actor.get_master_addr_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))

    class Strategy:
        def setup_distributed(self):
            self.listener = socket.create_server(("127.0.0.1", port))

    strategy = Strategy()
    actor._setup_distributed(strategy)
    strategy.listener.close()


def test_other_ranks_take_the_port_they_are_given(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    actor = QarlPolicyActor(2, 1, "127.0.0.1", 23456)
    assert actor.get_master_addr_port() == ("127.0.0.1", 23456) and actor._kept is None
