"""Muon on ZeRO-partitioned parameters: equal to ``torch.optim.Muon`` on one process, at every ZeRO stage and world size.

Why not DeepSpeed 0.19's own: it chooses parameters by their number of dimensions, and under ZeRO-3 all are 1-D, so that none is
chosen; under ZeRO-1/2 it orthogonalises each micro-batch's gradient as it arrives, before the accumulation is complete and before
clipping; it takes routers for matrices, decays norms, and ignores the number of steps. None of that can be configured. Here
DeepSpeed sees an ordinary client optimizer: it averages, accumulates and clips the raw gradients, calls :meth:`Muon.step` with its
flat float32 partitions, and casts the result. Momentum is elementwise and lives in the partition; whole matrices exist only
inside a step, one batch at a time (:mod:`qarl_openrlhf.optim.exchange`).
"""

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.optim.adamw import adamw

from qarl_openrlhf.optim import client, groups, shards
from qarl_openrlhf.optim.exchange import Exchange, plan
from qarl_openrlhf.optim.newton_schulz import newton_schulz, scale


class Muon(torch.optim.Optimizer):
    """Muon for groups with ``algorithm`` "muon", AdamW for those with "adamw" (see :mod:`qarl_openrlhf.optim.groups`).

    Attributes:
        orthogonalized: Newton-Schulz runs of this rank, counted in matrices.
    """

    def __init__(self, model: nn.Module, muon: dict, adam: dict):
        self.names = shards.trained_names(model)
        self.shapes = groups.matrix_shapes(model)
        self.orthogonalized = 0
        self._plans: dict[int, tuple[Exchange, list]] = {}
        super().__init__(groups.parameter_groups(model, muon, adam), {})

    def bind(self, zero) -> None:
        """Learn where the matrices lie in the partitions of DeepSpeed's ZeRO optimizer; once, after it was made."""
        on_cards = get_accelerator().device_name() != "cpu"
        for partition in shards.partitions(zero, self.names, self.shapes):
            device = torch.device(get_accelerator().current_device_name()) if on_cards else torch.device("cpu")
            exchange = Exchange(partition.group, device)
            self._plans[id(partition.flat)] = exchange, plan(partition.stacks, exchange.world, exchange.rank)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update of the partitions that are in the parameter groups now (ZeRO passes them one by one)."""
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    (self._muon if group["algorithm"] == "muon" else self._adamw)(flat, group)

    def _muon(self, flat: Tensor, group: dict) -> None:
        if id(flat) not in self._plans:
            raise RuntimeError("Muon was stepped before it was bound to DeepSpeed's ZeRO optimizer")
        exchange, batches = self._plans[id(flat)]
        state = self.state[flat]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(flat.grad)
        momentum = state["momentum_buffer"].lerp_(flat.grad, 1 - group["momentum"])
        # In place: DeepSpeed drops the gradient after the step, and a copy of it would be the peak of the card's memory.
        update = flat.grad.lerp_(momentum, group["momentum"]) if group["nesterov"] else momentum
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        for batch in batches:
            directions = exchange.apply(batch, update, lambda matrices: self._orthogonal(matrices, group["ns_steps"]))
            for stack, direction in zip(batch.stacks, directions, strict=True):
                rate = group["lr"] * scale(group["scale"], stack.rows, stack.columns)
                flat[stack.offset : stack.offset + direction.numel()].add_(direction.to(flat.device), alpha=-rate)

    def _orthogonal(self, matrices: Tensor, steps: int) -> Tensor:
        self.orthogonalized += matrices.shape[0]
        return newton_schulz(matrices, steps)

    def _adamw(self, flat: Tensor, group: dict) -> None:
        state = self.state[flat]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
        state["step"] = state["step"].to(flat.device)  # a checkpoint leaves it in main memory
        beta1, beta2 = group["betas"]
        # Fused: one pass. The others make two float32 copies of the partition on their way, with embeddings the peak of a card's memory.
        adamw(
            [flat], [flat.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], amsgrad=False, beta1=beta1,
            beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            fused=True,
        )  # fmt: skip


def in_place_of_deepspeeds(muon: dict, adam: dict):
    """Within it ``deepspeed.initialize`` builds a :class:`Muon` for its model, see :mod:`qarl_openrlhf.optim.client`."""

    def make(model: nn.Module, parameters, config: dict) -> Muon:
        if config["zero_optimization"]["stage"] == 0:
            raise ValueError("Muon needs ZeRO: use --ds.zero_stage 1, 2 or 3 with --actor.optim muon")
        return Muon(model, muon, adam)

    # With weights in main memory DeepSpeed would insist on an optimizer of its own.
    return client.in_place_of_deepspeeds(make, Muon.bind, zero_force_ds_cpu_optimizer=False)
