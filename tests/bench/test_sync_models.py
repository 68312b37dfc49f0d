"""The models that pushes are measured with: what they publish is what an engine of that config takes."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from transformers import Qwen3ForCausalLM

from qarl_openrlhf.bench import sync


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_tied_where_the_config_says_so(tied):
    config = sync.config_of("tiny", 1)
    config.tie_word_embeddings = tied
    model = sync.masters_of(Qwen3ForCausalLM, config, torch.device("cpu"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert all(parameter.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("scheme", ["bf16", "w4a16"])
def test_a_repeated_layer_is_gathered_and_published_as_all_layers_of_a_whole_model_would(scheme):
    """Names in the whole model's order; each parameter of the layer is gathered once a layer, all others once."""
    gathered = Counter()

    class Counting(sync.Learner):
        @contextmanager
        def gather(self, parameters):
            gathered.update(id(parameter) for parameter in parameters)
            yield

    whole = sync.Learner("tiny-moe", 3, scheme, device="cpu", repeated=False)
    repeated = Counting("tiny-moe", 3, scheme, device="cpu")
    names = [(name, tensor.dtype, tensor.shape) for name, tensor in whole.tensors()]
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in repeated.tensors()] == names
    for name, parameter in repeated.model.named_parameters():
        assert gathered[id(parameter)] == (3 if ".layers.0." in name else 1), name


def test_a_fingerprint_sees_a_byte_a_name_and_the_order():
    a, b = torch.arange(8.0), torch.ones(3)
    changed = a.clone()
    changed.view(torch.uint8)[5] ^= 1

    def mark(tensors) -> str:
        seen = sync.Fingerprint()
        assert len(list(seen.watch(iter(tensors)))) == len(tensors)
        return str(seen)

    same = mark([("a", a), ("b", b)])
    assert mark([("a", a.clone()), ("b", b)]) == same
    others = [[("a", changed), ("b", b)], [("b", b), ("a", a)], [("a", a), ("c", b)], [("a", a.view(2, 4)), ("b", b)]]
    assert len({same, *map(mark, others)}) == 5
