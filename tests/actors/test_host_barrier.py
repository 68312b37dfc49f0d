"""The learners' barrier that needs no GPU."""

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from qarl_openrlhf.actors.host_barrier import HostBarrier
from tests.ranks import Ranks

WORLD, ROUNDS = 3, 4


def rank(number: int, world: int, directory: str) -> None:
    dist.init_process_group("gloo")
    barrier, times = HostBarrier(), []
    for turn in range(ROUNDS):
        if number == turn % world:
            time.sleep(0.3)
        arrived = time.monotonic()
        barrier()
        times.append((arrived, time.monotonic()))
    Path(directory, str(number)).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def test_nobody_leaves_before_the_last_has_arrived(tmp_path):
    Ranks(rank, WORLD, str(tmp_path)).wait(60)
    found = [json.loads((tmp_path / str(number)).read_text()) for number in range(WORLD)]
    for turn in range(ROUNDS):
        times = [mine[turn] for mine in found]
        assert min(leaving for _, leaving in times) >= max(arriving for arriving, _ in times) - 0.05


def test_one_rank_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: pytest.fail("asked for the store"))
    HostBarrier()()
