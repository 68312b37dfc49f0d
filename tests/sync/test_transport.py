"""The gloo group between threads of this process: bytes arrive, a lost peer is an error, a new group replaces a broken one."""

import threading
import time

import pytest
import torch

from qarl_openrlhf.sync import transport

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def make_sender(world_size: int, timeout_s: float):
    return transport.make_sender("gloo", HOST, world_size, timeout_s, CPU)


def receivers(sender, count: int, receive) -> list[threading.Thread]:
    """Threads that join as ranks 1..count and call receive(rank, receiver)."""

    def run(rank):
        receive(rank, transport.join(sender.info, rank, CPU, HOST))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, count + 1)]
    for thread in threads:
        thread.start()
    return threads


def finished(work, timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.005)
    return work.is_completed()


def test_bytes_arrive_at_every_rank_and_groups_use_different_ports():
    flat = torch.randint(0, 255, (1_000_003,), dtype=torch.uint8)
    ports = set()
    for _ in range(2):
        sender = make_sender(3, 20)
        got = {}

        def receive(rank, group):
            got[rank] = group.receive(flat.nbytes)

        threads = receivers(sender, 2, receive)
        sender.connect().result(20)
        work = sender.send(flat).work
        assert finished(work, 20)
        work.wait()
        for thread in threads:
            thread.join(20)
        assert all(torch.equal(got[rank], flat) for rank in (1, 2))
        ports.add(sender.info.port)
        sender.close()
    assert len(ports) == 2


def test_a_peer_that_leaves_ends_the_send_with_an_error():
    sender = make_sender(2, 20)
    threads = receivers(sender, 1, lambda rank, group: None)  # joins, then drops its group
    sender.connect().result(20)
    for thread in threads:
        thread.join(20)
    started = time.monotonic()
    work = sender.send(torch.zeros(50_000_000, dtype=torch.uint8)).work
    assert finished(work, 10)
    with pytest.raises(RuntimeError):
        work.wait()
    assert time.monotonic() - started < 10


def test_a_silent_peer_blocks_neither_the_sender_nor_its_close():
    sender = make_sender(2, 3)
    release = threading.Event()
    receivers(sender, 1, lambda rank, group: release.wait(30))
    sender.connect().result(20)
    started = time.monotonic()
    work = sender.send(torch.zeros(50_000_000, dtype=torch.uint8)).work
    sender.close()
    assert time.monotonic() - started < 1
    assert finished(work, 10)  # gloo's own time-out
    release.set()


def test_an_unknown_transport_is_refused_by_name():
    with pytest.raises(ValueError, match="carrier.*gloo, nccl, ipc"):
        transport.backend("carrier")


def test_a_group_that_never_completes_fails_after_its_time_out():
    sender = make_sender(2, 1)
    joined = sender.connect()
    with pytest.raises(Exception, match="(?i)time"):
        joined.result(20)


def test_closing_frees_ranks_that_wait_for_a_missing_one():
    sender = make_sender(3, 60)
    failed = threading.Event()

    def wait():
        try:
            transport.join(sender.info, 1, CPU, HOST)
        except RuntimeError:
            failed.set()

    threading.Thread(target=wait, daemon=True).start()
    joined = sender.connect()
    time.sleep(0.5)
    sender.close()
    assert failed.wait(10)
    assert joined.exception(10) is not None


def test_staged_senders_pack_in_two_buffers_that_take_turns():
    sender = transport.StagedSender(transport.GroupInfo("ipc", HOST, 0, 2, 1), CPU)
    assert sender.info.to_dict() == {"transport": "ipc", "host": HOST, "port": 0, "world_size": 2, "timeout_s": 1}
    sender.begin()
    first, second, third = (sender.buffer(n) for n in (100, 100, 60))
    assert first.dtype == torch.uint8 and [t.numel() for t in (first, second, third)] == [100, 100, 60]
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    sender.begin()  # the next update fills the same buffers in the same order
    assert sender.buffer(100).data_ptr() == first.data_ptr() and sender.staging.nbytes == 200


def test_the_gpu_senders_are_made_by_their_modules():
    for name in ("ipc", "nccl"):
        assert issubclass(transport.backend(name).Sender, transport.StagedSender)
