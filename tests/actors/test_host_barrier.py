"""The learners' barrier that needs no GPU."""

import multiprocessing
import socket
import time

import pytest
import torch.distributed as dist

from qarl_openrlhf.actors.host_barrier import HostBarrier

WORLD, ROUNDS = 3, 4


def rank(number: int, port: int, left) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=WORLD)
    barrier = HostBarrier()
    for turn in range(ROUNDS):
        if number == turn % WORLD:
            time.sleep(0.3)
        arrived = time.monotonic()
        barrier()
        left.put((turn, number, arrived, time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()


def test_nobody_leaves_before_the_last_has_arrived():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")  # a fork would inherit the process group of other tests
    left = context.Queue()
    ranks = [context.Process(target=rank, args=(number, port, left)) for number in range(WORLD)]
    for process in ranks:
        process.start()
    found = [left.get(timeout=60) for _ in range(WORLD * ROUNDS)]
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    for turn in range(ROUNDS):
        times = [entry[2:] for entry in found if entry[0] == turn]
        assert len(times) == WORLD and min(leaving for _, leaving in times) >= max(arriving for arriving, _ in times) - 0.05


def test_one_rank_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: pytest.fail("asked for the store"))
    HostBarrier()()
