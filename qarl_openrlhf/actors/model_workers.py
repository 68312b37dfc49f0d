"""Reference, reward and critic actors: OpenRLHF's own, in a worker that has our patches (see ``qarl_openrlhf.actors``)."""

import ray
from openrlhf.trainer.ray import launcher, ppo_critic


def plain_class(actor_class) -> type:
    """The Python class that ``@ray.remote`` wrapped."""
    return actor_class.__ray_metadata__.modified_class


@ray.remote(num_gpus=1)
class ReferenceModelActor(plain_class(launcher.ReferenceModelActor)):
    pass


@ray.remote(num_gpus=1)
class RewardModelActor(plain_class(launcher.RewardModelActor)):
    pass


@ray.remote(num_gpus=1)
class CriticModelActor(plain_class(ppo_critic.CriticModelActor)):
    pass
