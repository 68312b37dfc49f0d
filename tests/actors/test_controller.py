"""What the controller of a run does between learner and checkpoint: the coefficient of a KL term, rollouts that the policy sits out."""

from types import SimpleNamespace as N

import pytest
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController

from qarl_openrlhf.actors import trainer
from qarl_openrlhf.actors.trainer import QarlPPOTrainer, QarlTrainingActor


class Learner:
    """An actor group of one process, called at once: ``ray.get`` is the identity here."""

    def __init__(self):
        self.buffer, self.trained, self.checkpoint_states = [], [], {}

    def async_run_method_batch(self, method_name, experience):
        return [getattr(self, method_name)(item) for item in experience]

    def async_run_method(self, method_name, **arguments):
        return [getattr(self, method_name)(**arguments)]

    def append(self, experience):
        self.buffer.append(experience)

    def fit(self, kl_ctl=None):
        self.trained.append(list(self.buffer))
        self.buffer.clear()
        return {"kl": 0.3}

    def drop_rollout(self):
        self.buffer.clear()

    def save_checkpoint(self, tag, client_states=None, metric_value=None, metric_key=None):
        self.checkpoint_states = dict(client_states)

    def get_checkpoint_states(self):
        return dict(self.checkpoint_states)


@pytest.fixture
def make(monkeypatch, tmp_path):
    monkeypatch.setattr(trainer.ray, "get", lambda refs, **_: refs)

    def build(kind, learner=None, critic=None, *, target=None, freezing_steps=-1, load=False):
        controller = kind.__new__(kind)
        (tmp_path / "_actor").mkdir(exist_ok=True)
        controller.args = N(
            algo=N(kl=N(target=target, init_coef=0.01)),
            critic=N(freezing_steps=freezing_steps),
            ds=N(enable_sleep=False),
            ckpt=N(save_steps=1, load_enable=load, path=str(tmp_path)),
            logger=N(logging_steps=1),
        )
        controller.actor_model_group, controller.critic_model_group = learner or Learner(), critic
        controller.kl_ctl = AdaptiveKLController(0.01, target, 100) if target else FixedKLController(0.01)
        controller.wandb_logger = controller.tensorboard_logger = None
        controller.best_eval_metric_key, controller.best_eval_metric_value, controller._latest_eval_metric_value = "", 0.0, None
        controller.metrics_writer = N(write=lambda *_: None, note=lambda *_: None)
        controller.samples_generator = N(rollout_state=lambda: {"exhausted": False, "sample_buffer": []}, resume=lambda state: None)
        return controller

    monkeypatch.setattr(trainer, "still_line", lambda *_: None)
    return build


@pytest.mark.parametrize("kind", [QarlPPOTrainer, QarlTrainingActor])
@pytest.mark.parametrize("target", [0.1, None])
def test_a_resumed_run_has_the_kl_coefficient_that_it_had_come_to(make, kind, target):
    before = make(kind, target=target)
    for _ in range(5):
        before.kl_ctl.update(0.3, 64)
    reached = before.kl_ctl.value
    assert (reached != 0.01) == bool(target)
    before.save_logs_and_checkpoints(5, {}, {"episode": 0, "global_step": 5})

    after = make(kind, before.actor_model_group, target=target, load=True)
    assert "kl_coef" not in after.init_checkpoint_states() and after.kl_ctl.value == reached


def test_a_coefficient_without_a_target_is_the_flags_at_a_resume(make):
    before = make(QarlPPOTrainer, target=0.1)
    before.kl_ctl.update(0.3, 64)
    before.save_logs_and_checkpoints(1, {}, {"episode": 0, "global_step": 1})
    after = make(QarlPPOTrainer, before.actor_model_group, load=True)
    after.init_checkpoint_states()
    assert after.kl_ctl.value == 0.01


def test_a_policy_that_is_freed_trains_on_its_own_rollout_alone(make):
    controller = make(QarlPPOTrainer, critic=Learner(), freezing_steps=1)
    for step in range(4):
        for group in (controller.actor_model_group, controller.critic_model_group):
            group.async_run_method_batch("append", experience=[step])
        controller.ppo_train(step)
    assert controller.critic_model_group.trained == [[0], [1], [2], [3]]
    assert controller.actor_model_group.trained == [[2], [3]]
