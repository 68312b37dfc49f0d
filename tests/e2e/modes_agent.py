"""A multi-turn agent for the tests: the first answer is always sent back once."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Twice(AgentInstanceBase):
    def __init__(self):
        self.turn = 0

    async def step(self, state_dict: dict, **_):
        self.turn += 1
        reward = torch.tensor(float(len(state_dict["action_text"]) % 2 == 0))
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": " again: ",
            "done": self.turn == 2,
            "sampling_params": None,
            "extra_logs": {"turns": torch.tensor(float(self.turn))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Twice)
