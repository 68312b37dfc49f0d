"""What a run says of one of its processes that ended by itself, whatever it was and however it ended."""

import os
import signal
import sys
import time
from types import SimpleNamespace as N

import pytest
import ray

from qarl_openrlhf.actors.actor_end import ended_actor

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else each worker imports what this module does, for 14 s
ARGS = N(train=N(agent_func_path=None), reward=N(remote_url=["reward.py"]))


class Worker:
    def pid(self) -> int:
        return os.getpid()

    def work(self) -> None:
        time.sleep(100)


class Controller(Worker):
    pass


def start(kind: type = Worker):
    """(handle, pid) of an actor in a process of its own."""
    actor = ray.remote(num_cpus=0)(kind).remote()
    return actor, ray.get(actor.pid.remote(), timeout=60)


def name_of(actor) -> str:
    return actor._actor_id.hex()


def end(actor, pid: int, how: int) -> None:
    work = actor.work.remote()
    time.sleep(0.5)
    os.kill(pid, how)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(work, timeout=60)


HOW = {
    signal.SIGKILL: "ended without a word: by SIGKILL (the kernel's for want of main memory, or someone's), or a C library called exit. What helps",
    signal.SIGTERM: "was ended by SIGTERM",
    signal.SIGSEGV: "ended by itself with exit code -11 (SIGSEGV): segmentation fault",
}


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.name)
def test_role_rank_pid_host_and_how_are_named(small_ray, how):
    actor, pid = start()
    names = {name_of(actor): "learner, rank 1"}
    assert ended_actor(names, ARGS) is None
    end(actor, pid, how)
    message = str(ended_actor(names, ARGS))
    assert message.startswith(f"learner, rank 1: its process (pid {pid} on {ray.util.get_node_ip_address()}) {HOW[how]}"), message
    assert ("--ds.adam_offload" in message) == (how == signal.SIGKILL)
    assert "reward.py" not in message and "\n" not in message  # rewards are computed in engines
    assert os.path.isfile(message.rpartition(". Log of the process: ")[2])


def test_the_first_to_end_is_named(small_ray):
    """Those that waited for it may follow."""
    (late, late_pid), (early, early_pid) = start(), start()
    names = {name_of(late): "learner, rank 0", name_of(early): "learner, rank 1"}
    end(early, early_pid, signal.SIGKILL)
    end(late, late_pid, signal.SIGABRT)
    assert str(ended_actor(names, ARGS)).startswith(f"learner, rank 1: its process (pid {early_pid} ")


def test_an_actor_whose_handle_nobody_has_is_known_by_its_class(small_ray):
    actor, pid = start(Controller)
    end(actor, pid, signal.SIGKILL)
    assert str(ended_actor({"Controller": "controller"}, ARGS)).startswith(f"controller: its process (pid {pid} ")
    assert ended_actor({"Another": "controller"}, ARGS) is None


def test_a_run_before_in_this_process_is_not_named(small_ray):
    actor, pid = start(Controller)
    earlier = frozenset(ray._private.state.actors())
    end(actor, pid, signal.SIGKILL)
    assert ended_actor({"Controller": "controller"}, ARGS, earlier=earlier) is None
    later, later_pid = start(Controller)
    end(later, later_pid, signal.SIGKILL)
    assert f"(pid {later_pid} " in str(ended_actor({"Controller": "controller"}, ARGS, earlier=earlier))


def test_what_ray_ended_is_left_to_ray(small_ray):
    actor, _ = start()
    work = actor.work.remote()
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(work, timeout=60)
    assert ended_actor({name_of(actor): "learner, rank 0"}, ARGS) is None
