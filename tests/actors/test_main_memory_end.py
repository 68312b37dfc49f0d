"""What a run says that Ray ended because the machine's memory was nearly full."""

import ray

from qarl_openrlhf.actors.main_memory_end import ended_for_memory, explain

# Ray 2.55's, cut.
TEXT = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: e38) was 119.72GB / 125.87GB "
    "(0.951195), which exceeds the memory usage threshold of 0.950000; Object store memory usage: [- objects spillable: 0; ]; Ray killed 1 "
    "worker(s) based on the killing policy: [(Actor(a45): job ID=01000000, lease ID=02, task name=QarlPPOTrainer.__init__, required "
    "resources={}, pid=5870, actual memory used=0.72GB, worker ID=99e)]; To see more information about memory usage on this node, use "
    "`ray logs raylet.out -ip 192.0.2.2`; Top 10 memory users: PID\tMEM(GB)\tCOMMAND, 5869\t28.68\tray::QarlPolicyActor.init_model_from_pretrained, "
    "14046\t5.95\tVLLM::EngineCore, 12326\t1.50\tray::QarlPolicyActor, 11644\t1.49\tray::QarlPolicyActor, 10096\t1.48\tray::QarlPolicyActor"
)


def test_the_line_names_node_limit_process_and_the_largest():
    line = explain(TEXT)
    assert line.startswith(
        "main memory of node 192.0.2.2 was nearly full (119.72 of 125.87 GB; Ray's limit is 95 %) and Ray ended QarlPPOTrainer.__init__ (pid 5870) of "
        "the run. Largest there: ray::QarlPolicyActor.init_model_from_pretrained (pid 5869) 28.68 GB, VLLM::EngineCore (pid 14046) 5.95 GB, "
    )
    assert line.count(" GB") == 5 and "--ds.adam_offload" in line and "\n" not in line


def test_an_unknown_text_is_still_an_answer():
    assert explain("out of memory").startswith("main memory was nearly full and Ray ended a process of the run. What helps: ")


def test_the_error_is_known_by_its_type_or_by_the_death_of_an_actor_of_the_run(monkeypatch):
    assert "28.68 GB" in str(ended_for_memory(ray.exceptions.OutOfMemoryError(TEXT)))

    from ray.core.generated.common_pb2 import ActorDeathCause

    cause, other = ActorDeathCause(), ActorDeathCause()
    cause.oom_context.error_message = TEXT
    other.actor_died_error_context.error_message = "killed"
    actors = {"a": {"JobID": "01", "DeathCause": other}, "b": {"JobID": "02", "DeathCause": cause}, "c": {"JobID": "01", "DeathCause": None}}
    monkeypatch.setattr(ray._private.state, "actors", lambda: actors)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"get_job_id": lambda self: "01"})())
    error = ray.exceptions.RayActorError()
    assert ended_for_memory(error) is None  # another job's
    actors["b"]["JobID"] = "01"
    assert "28.68 GB" in str(ended_for_memory(error))
