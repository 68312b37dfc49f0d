"""A few responses of a rollout, token by token: what they say, how probable each token was, what the objective made of it."""

import torch
from torch import Tensor

EDGE_TOKENS = 512  # a longer response is kept without its middle: repetitions are at the end


class TokenRecorder:
    """Picks three responses of a rollout: the one furthest out of its band of each sign of the advantage, and one as it comes.

    ``tokenizer`` turns ids into text (None: records have ids only); ``objective`` tells each token's push (None: no push).
    """

    def __init__(self, tokenizer=None, objective=None):
        self.tokenizer, self.objective = tokenizer, objective
        self.chosen: dict[str, tuple[float, dict]] = {}

    @torch.no_grad()
    def offer(self, batch, current: Tensor, states, update: int) -> None:
        """One micro-batch: ``Experience`` with its old log-probs, current log-probs [B, A], ``TokenStates`` or None."""
        mask = batch.action_mask.bool()
        lengths = mask.sum(-1).clamp(min=1)
        drift = (torch.where(mask, current - batch.action_log_probs, 0.0).sum(-1) / lengths).abs()
        out = (states.region != 1) & mask if states is not None else torch.zeros_like(mask)
        score = out.sum(-1) / lengths + 1e-3 * drift.clamp(max=20)  # the drift decides between equals
        advantage = torch.where(mask, batch.advantages, 0.0).sum(-1) / lengths
        none = torch.full_like(score, -1.0)
        best = [torch.where(side & mask.any(-1), score, none).max(0) for side in (advantage > 0, advantage < 0)]
        answers = [x for pair in best for x in pair] + [mask[0].any()]
        *found, first_has_tokens = torch.stack([x.double() for x in answers]).tolist()  # one wait for the device
        for why, value, row in zip(("most out of band, A > 0", "most out of band, A < 0"), found[::2], found[1::2]):
            if value >= 0 and value > self.chosen.get(why, (-1.0,))[0]:
                self.chosen[why] = (value, self._row(batch, int(row), current, states, update))
        if first_has_tokens:
            self.chosen["as it comes"] = (0.0, self._row(batch, 0, current, states, update))

    def _row(self, batch, row: int, current: Tensor, states, update: int) -> dict:
        """Views of one response's tensors, [1, A] each: nothing is computed for responses that another one replaces."""
        one = slice(row, row + 1)
        rewards = getattr(batch, "rewards", None)
        return {
            "update": update,
            "reward": None if rewards is None else rewards[one],
            "sequences": batch.sequences[one],
            "attention_mask": batch.attention_mask[one],
            "mask": batch.action_mask[one].bool(),
            "advantages": batch.advantages[one],
            "current": current[one],
            "old": batch.action_log_probs[one],
            "sampler": None if batch.rollout_log_probs is None else batch.rollout_log_probs[one],
            "region": None if states is None else states.region[one],
            "weight": None if states is None else states.weight[one],
        }

    def records(self) -> list[dict]:
        """The chosen responses, ready for JSON: see ``_record``."""
        return [self._record(why, row) for why, (_, row) in self.chosen.items()]

    def _record(self, why: str, row: dict) -> dict:
        """{why, update, reward, advantage, prompt, ids, tokens, old, current, sampler, weight, region, push, left_out}.

        Lists hold one entry a kept response token: log-probs in nats, ``region`` an index into REGIONS, ``push`` the
        objective's derivative by that token's log-prob (0: no gradient), as a multiple of the response's |advantage|.
        ``left_out``: tokens missing in the middle, after ``EDGE_TOKENS``.
        """
        mask = row["mask"][0]
        ids = row["sequences"][0, 1:][mask].tolist()
        kept = list(range(len(ids)))
        if len(ids) > 2 * EDGE_TOKENS:
            kept = kept[:EDGE_TOKENS] + kept[-EDGE_TOKENS:]
        first = int(mask.nonzero()[0]) + 1 if mask.any() else 0
        prompt = row["sequences"][0, :first][row["attention_mask"][0, :first].bool()].tolist()
        advantage = row["advantages"][0][mask]
        region = None if row["region"] is None else row["region"][0][mask].tolist()

        def values(name: str) -> list[float] | None:
            if row[name] is None:
                return None
            chosen = row[name][0][mask].float().clamp(min=-1e4).tolist()  # JSON has no -inf
            return [round(chosen[i], 5) for i in kept]

        return {
            "why": why,
            "update": row["update"],
            "reward": None if row["reward"] is None else float(row["reward"][0].flatten()[0]),
            "advantage": float(advantage.mean()) if len(ids) else 0.0,
            "prompt": self._text(prompt),
            "ids": [ids[i] for i in kept],
            "tokens": None if self.tokenizer is None else [self.tokenizer.decode([ids[i]]) for i in kept],
            **{name: values(name) for name in ("old", "current", "sampler", "weight")},
            "region": None if region is None else [region[i] for i in kept],
            "push": self._push(row, mask, kept, len(ids)),
            "left_out": len(ids) - len(kept),
        }

    def _push(self, row: dict, mask: Tensor, kept: list[int], length: int) -> list[float] | None:
        if self.objective is None or row["sampler"] is None or not length:
            return None
        push = self.objective.token_coefficients(row["current"], row["old"], row["sampler"], row["advantages"], row["mask"])
        if self.objective.mean == "responses":
            push = push * length  # each token's share of a mean over the response, as comparable as a mean over tokens
        scale = float(row["advantages"][0][mask].abs().mean()) or 1.0
        push = (push[0][mask] / scale).tolist()
        return [round(push[i], 4) for i in kept]

    def _text(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids)
