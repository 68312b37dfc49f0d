"""The policy: OpenRLHF's Actor with BF16 master weights and a forward on the published low-bit tensors."""

import torch
from openrlhf.models import Actor
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor
from openrlhf.models.utils import compute_entropy, log_probs_from_logits

from qarl_openrlhf.actors.chunked_log_probs import ChunkedHead
from qarl_openrlhf.quant.convert import ConversionReport, convert_model
from qarl_openrlhf.quant.scheme import QuantScheme


class QuantActor(Actor):
    """An ``Actor`` whose linear layers run in a ``QuantScheme``.

    The master weights are the module's BF16 parameters, which DeepSpeed casts from its float32 copy after every optimizer
    step. They are quantized once per step; forward, publish and export all read that one result.

    ``logprob_chunk``: tokens whose logits exist at a time (``--actor.logprob_chunk``); 0 makes them all at once.
    """

    logprob_chunk = 0
    chunked_head: ChunkedHead | None = None

    @classmethod
    def convert(cls, actor: Actor, scheme: QuantScheme, *, cache: str) -> ConversionReport:
        """Turn ``actor`` into a ``QuantActor`` in place, before DeepSpeed wraps it (names and parameters stay)."""
        report = convert_model(actor.model, scheme, cache=cache)
        actor.__class__ = cls
        actor.scheme = scheme
        actor.last_step_seen = 0
        return report

    @property
    def network(self) -> torch.nn.Module:
        """The Hugging Face model, inside or outside DeepSpeed's engine."""
        return getattr(self.model, "module", self.model)

    @property
    def quant_cache(self):
        return self.network.quant_cache

    def weights_changed(self) -> None:
        """Called after every ``engine.step()``: drops the packed weights if that one ended an accumulation window."""
        if self.model.global_steps != self.last_step_seen:
            self.last_step_seen = self.model.global_steps
            self.quant_cache.invalidate()

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, **kwargs):
        """Log-probabilities of the action tokens, float32 [B, A], as in ``Actor.forward``.

        For plain padded batches the lm_head runs only from the first position any row acts at: with a shared prompt length
        that saves most of the lm_head product and of the float32 logits. Everything else is left to OpenRLHF.
        """
        return_entropy = kwargs.get("return_entropy", False)
        extra = {k for k, v in kwargs.items() if v is not None} - {"return_entropy"}
        whole = action_mask is not None and action_mask.shape[1] == sequences.shape[1] - 1
        if self.logprob_chunk and whole and not self.is_vlm and not extra:
            log_probs, output = self._in_chunks(sequences, action_mask, attention_mask, bool(return_entropy))
            return (log_probs, output) if return_output else log_probs
        plain = action_mask is not None and not self.packing_samples and not self.is_vlm
        if not plain or extra or action_mask.shape[1] != sequences.shape[1] - 1:
            return super().forward(
                sequences, action_mask, attention_mask=attention_mask, return_output=return_output, **kwargs
            )

        acting = action_mask.any(dim=0).nonzero()
        first = int(acting[0]) if len(acting) else sequences.shape[1] - 2
        position_ids = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        output = self.model(
            sequences,
            attention_mask=attention_mask,
            position_ids=position_ids,
            logits_to_keep=sequences.shape[1] - first,
        )
        logits = output["logits"][:, :-1].float()  # position t predicts token t + 1; the last predicts nothing
        if self.temperature != 1.0:
            logits = logits / self.temperature
        targets = sequences[:, first + 1 :]
        log_probs = _pad_left(log_probs_from_logits(logits, targets), first) * action_mask.float()
        output["logits"] = logits
        if return_entropy:
            output.entropy = _pad_left(compute_entropy(logits), first)
        return (log_probs, output) if return_output else log_probs

    def _in_chunks(self, sequences, action_mask, attention_mask, return_entropy: bool):
        """(log-probs float32 [B, S - 1], output of the model without logits, with ``entropy`` [B, S - 1] if asked for).

        Both are 0 elsewhere than at action tokens.
        """
        if self.chunked_head is None:
            self.chunked_head = ChunkedHead(self.network, self.logprob_chunk)
        no_ring = None  # ring attention is refused (config), and OpenRLHF's packing asks for its process group
        batch, length = sequences.shape
        acting = torch.nn.functional.pad(action_mask.bool(), (0, 1))  # the last position predicts nothing
        if self.packing_samples:
            ids, position_ids, targets, pad, indices = unpad_and_slice_tensor(sequences, attention_mask, no_ring)
            acting, attention_mask = acting.flatten()[indices], None
        else:
            ids, targets = sequences, sequences.roll(-1, 1)
            position_ids = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        rows = acting.flatten().nonzero()[:, 0]
        with self.chunked_head.reading(rows, targets.flatten()[rows], self.temperature, return_entropy):
            output = self.model(ids, attention_mask=attention_mask, position_ids=position_ids)
        values = output["logits"]
        self.chunked_head.require_untouched(values)
        output["logits"] = None

        def unpacked(column: int) -> torch.Tensor:
            one = values[..., column]
            if self.packing_samples:
                one = gather_and_pad_tensor(one, no_ring, pad, indices, batch, length)
            return one[:, :-1]

        if return_entropy:
            output.entropy = unpacked(1)
        return unpacked(0) * action_mask.float(), output


def _pad_left(x: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (columns, 0))
