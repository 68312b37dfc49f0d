"""Log-probs and entropies of response tokens without their logits: lm_head a chunk of tokens at a time.

The logits of a micro-batch are the largest thing a learner holds: 22,528 tokens of a vocabulary of 151,936 take 13.7 GB in
float32, three times (themselves, their gradient, what is added to it). Here a chunk's logits exist only while the chunk is at
work, in the forward and, made again, in the backward; prompt tokens, which no objective looks at, have none.

    z = lm_head(h) / temperature       log p(y) = z_y - logsumexp z       H = logsumexp z - sum_v p_v z_v
    d log p(y) / dz_v = [v = y] - p_v                                     dH / dz_v = -p_v (z_v - logsumexp z + H)

Each token's numbers are those of the whole product up to the order of its additions, which a library may choose by the number
of rows; old and new log-probs are made from the same rows in the same chunks and so are equal bit for bit before the first
update. The gradient of lm_head is a sum over chunks, in float32, of products rounded to the weight's dtype.
"""

from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qarl_openrlhf.kernels import dispatch, product
from qarl_openrlhf.quant.dtypes import product_dtype
from qarl_openrlhf.quant.errors import QuantError


class ChunkedLogProbs(torch.autograd.Function):
    """hidden [T, H], weight [V, H], bias [V] or None, rows and targets int64 [N] -> float32 [T, 1 or 2].

    Column 0: log p(targets[i]) in row rows[i]; column 1, if asked for: the entropy. Other rows are 0. ``rows`` must not repeat.
    """

    @staticmethod
    @product.exact
    def forward(ctx, hidden, weight, bias, rows, targets, temperature: float, chunk: int, with_entropy: bool):
        values = hidden.new_zeros((hidden.shape[0], 1 + with_entropy), dtype=torch.float32)
        normalisers = []
        for part, wanted in zip(rows.split(chunk), targets.split(chunk), strict=True):
            logits = product.forward(hidden[part], weight, bias)
            values[part], lse = dispatch.token_log_probs(logits, wanted, temperature, with_entropy)
            normalisers.append(lse)
        saved = torch.cat(normalisers) if normalisers else values.new_zeros(0)
        ctx.save_for_backward(hidden, weight, bias, rows, targets, saved, values)
        ctx.temperature, ctx.chunk = temperature, chunk
        return values

    @staticmethod
    @product.exact
    def backward(ctx, grad):
        hidden, weight, bias, rows, targets, normalisers, values = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        parts = (t.split(ctx.chunk) for t in (rows, targets, normalisers))
        for part, wanted, lse in zip(*parts, strict=True):
            x = hidden[part]
            logits = product.forward(x, weight, bias)
            d_logits = dispatch.token_log_probs_backward(logits, wanted, values[part], lse, grad[part], ctx.temperature)
            dx, dw, db = product.backward(d_logits, x, weight, needs, weight.dtype)
            if needs[0]:
                d_hidden[part] = dx
            if needs[1]:
                d_weight += dw
            if needs[2]:
                d_bias += db
            del logits, d_logits, dx, dw, db  # not beside those of the next chunk, nor beside the sum in two dtypes
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


class ChunkedHead:
    """A model's lm_head, which gives log-probs in the place of logits while ``reading``.

    The product stays inside the model's forward: DeepSpeed's hooks gather lm_head around it, in the backward, too.
    """

    def __init__(self, network: nn.Module, chunk: int):
        self.network, self.chunk = network, chunk
        self.head = network.get_output_embeddings()
        self.checked = False
        self.made: Tensor | None = None

    @contextmanager
    def reading(self, rows: Tensor, targets: Tensor, temperature: float, with_entropy: bool):
        """Within it the model's ``logits`` [B, S, V] are [B, S, 1 or 2]: log-prob and entropy at flat positions ``rows`` [N],
        for ``targets`` [N]; 0 elsewhere."""
        head = self.head

        def forward(hidden: Tensor) -> Tensor:
            flat = hidden.reshape(-1, hidden.shape[-1])
            dtype = product_dtype(flat, head.weight, "lm_head")
            operands = [None if t is None else t.to(dtype) for t in (flat, head.weight, head.bias)]
            values = ChunkedLogProbs.apply(*operands, rows, targets, temperature, self.chunk, with_entropy)
            self.made = values.detach()
            return values.view(*hidden.shape[:-1], -1)

        self.made = None
        head.forward = forward
        try:
            yield
        finally:
            del head.forward

    def require_untouched(self, logits: Tensor) -> None:
        """QuantError, in the first forward, for a model that does not return what its lm_head gives (softcapping, a scale)."""
        if self.checked:
            return
        made, got = self.made, logits.detach()
        if made is None or got.numel() != made.numel() or not torch.equal(got.view_as(made), made):
            raise QuantError(
                f"{type(self.network).__name__} changes its logits after lm_head, or has none, so that log-probs cannot be made in "
                "chunks: use --actor.logprob_chunk 0"
            )
        self.checked = True
