"""Put our actors where OpenRLHF's ``train`` looks for them."""

import time
from functools import wraps
from itertools import count

import ray
from openrlhf.cli import train_ppo_ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.launcher import RayActorGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qarl_openrlhf.actors import model_workers, policy, trainer
from qarl_openrlhf.actors.actor_end import ended_actor
from qarl_openrlhf.actors.main_memory_end import ended_for_memory
from qarl_openrlhf.actors.strategy import make_strategy
from qarl_openrlhf.engine.actor import QarlRolloutActor
from qarl_openrlhf.engine.engine_args import chosen
from qarl_openrlhf.metrics.startup import Startup
from qarl_openrlhf.runtime import placement_group

CONTROLLERS = trainer.QarlPPOTrainer, trainer.QarlPPOTrainerAsync, trainer.QarlTrainingActor, trainer.QarlGenerateSamplesActor
SETTLED_S = 2.0


def install(args, startup: Startup | None = None):
    """Returns OpenRLHF's ``train`` function, which now builds our classes (this process only) and tells ``startup`` what it
    waits for. ActorProcessError if a process of the run ended by itself, MainMemoryError if Ray ended one for want of memory."""
    startup = startup or Startup(show=lambda line, flush: None)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # The controller writes the run directory, which the driver reads: same node.
    ppo_trainer.PPOTrainer = ray.remote(trainer.QarlPPOTrainer).options(scheduling_strategy=here)
    ppo_trainer_async.PPOTrainerAsync = ray.remote(trainer.QarlPPOTrainerAsync).options(scheduling_strategy=here)
    names: dict[str, str] = {}  # of the run's actors, as ``ended_actor`` takes them
    earlier = frozenset(ray._private.state.actors())
    vllm_engine.RolloutRayActor = _EngineFactory(ray.remote(QarlRolloutActor), args, startup, names)
    # The one call that ``create_vllm_engines`` makes: "sleep". Models are loaded when it is answered, but the processes that will
    # load them, and the controller, start and import beside the engines' own start.
    vllm_engine.batch_vllm_engine_call = _Group.load_after
    on_gpu = ray.remote(num_gpus=1)
    train_ppo_ray.PolicyModelActor = on_gpu(policy.QarlPolicyActor)
    train_ppo_ray.ReferenceModelActor = on_gpu(model_workers.ReferenceModelActor)
    train_ppo_ray.RewardModelActor = on_gpu(model_workers.RewardModelActor)
    train_ppo_ray.CriticModelActor = on_gpu(model_workers.CriticModelActor)
    _Group.startup, _Group.awaited, _Group.names, train_ppo_ray.RayActorGroup = startup, [], names, _Group
    _Group.actor_classes = {
        "learner": train_ppo_ray.PolicyModelActor,
        "reference": train_ppo_ray.ReferenceModelActor,
        "reward model": train_ppo_ray.RewardModelActor,
        "critic": train_ppo_ray.CriticModelActor,
    }
    names |= {actor_class.__ray_metadata__.class_name: role for role, actor_class in _Group.actor_classes.items()}
    names |= {controller.__name__: "controller" for controller in CONTROLLERS}
    train_ppo_ray.get_strategy = make_strategy
    train_ppo_ray.placement_group = placement_group

    @wraps(train_ppo_ray.train)
    def train(args):
        try:
            train_ppo_ray.train(args)
        except ray.exceptions.RayError as error:
            if ended := _why(error, names, args, earlier):
                raise ended from None
            raise

    return train


def _why(error: Exception, names: dict[str, str], args, earlier: frozenset[str]) -> Exception | None:
    """The end of a process that ``error`` comes from. Whoever talks to a process learns of its end before Ray does, and an error
    of theirs may be here first."""
    until = time.monotonic() + SETTLED_S
    while not (ended := ended_for_memory(error) or ended_actor(names, args, earlier=earlier)) and time.monotonic() < until:
        time.sleep(0.1)
    return ended


class _Group(RayActorGroup):
    """Has its actors load their model when engines that share their GPUs sleep, and says when all have."""

    # Of the class: a group travels to the controller, which needs none of them.
    startup: Startup
    names: dict[str, str] = {}  # of the actors, by id: for :func:`ended_actor`
    actor_classes: dict
    awaited: list = []  # what the engines still have to answer

    @classmethod
    def load_after(cls, engines: list, method: str) -> None:
        """Call ``method`` of all engines; no group loads its model before they have answered."""
        cls.awaited += [getattr(engine, method).remote() for engine in engines]

    def __init__(self, num_nodes, num_gpus_per_node, ray_actor_type, *args, **kwargs):
        self.role = next(role for role, actor_class in self.actor_classes.items() if actor_class is ray_actor_type)
        super().__init__(num_nodes, num_gpus_per_node, ray_actor_type, *args, **kwargs)
        self.names.update({actor._actor_id.hex(): f"{self.role}, rank {rank}" for rank, actor in enumerate(self._actor_handlers)})

    def async_init_model_from_pretrained(self, *args, **kwargs):
        ray.get(self.awaited)
        refs = super().async_init_model_from_pretrained(*args, **kwargs)
        self.startup.watch(f"{self.role} loads its model", f"{self.role} ready", refs)
        return refs


class _EngineFactory:
    """``RolloutRayActor.options(...).remote(...)`` with the scheme and device of this run added."""

    def __init__(self, actor_class, args, startup: Startup, names: dict[str, str], options: dict | None = None, numbers: count | None = None):
        self.actor_class, self.args, self.startup, self.names, self.ray_options = actor_class, args, startup, names, options or {}
        self.numbers = numbers or count()

    def options(self, **ray_options) -> "_EngineFactory":
        return _EngineFactory(self.actor_class, self.args, self.startup, self.names, ray_options, self.numbers)

    def remote(self, **kwargs):
        name = f"engine {next(self.numbers)}"
        engine = self._remote(qarl_name=name, **kwargs)
        self.names[engine._actor_id.hex()] = name
        self.startup.watch(f"{name} starts vLLM", f"{name} ready", [engine.weights_state.remote()])
        return engine

    def _remote(self, **kwargs):
        # Every prompt of a rollout is a call that waits in the engine; Ray's 1000 would keep later calls out, an update's too.
        return self.actor_class.options(max_concurrency=1_000_000, **self.ray_options).remote(
            qarl_scheme=self.args.quant.scheme,
            qarl_device=self.args.device,
            qarl_stop=self.args.rollout.stop,
            qarl_reward_timeout_s=self.args.reward.timeout_s,
            qarl_allow_truncated_sampling=self.args.rollout.allow_truncated_sampling,
            **kwargs,
            **chosen(self.args),
        )
