"""The models that pushes are measured with: what they publish is what an engine of that config takes."""

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
