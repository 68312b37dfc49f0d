"""Tiny random models with a real tokenizer, saved as Hugging Face directories: the smallest thing that the whole stack runs."""

import os

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 512
FAMILIES = ("llama", "qwen2", "qwen3")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [f"{a} + {b} = {a + b}" for a in range(60) for b in range(60)] + ["What is the sum of these numbers?"] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")


def make_model(family: str, *, hidden: int = 64, layers: int = 2, tied: bool = False, seed: int = 0, dtype=torch.bfloat16):
    """A random causal LM: head size hidden/4, 4 heads, 2 key-value heads, MLP 2 x hidden; biases and norms are not trivial."""
    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=3,
    )
    config, model_class = {
        "llama": (LlamaConfig(**common), LlamaForCausalLM),
        "qwen2": (Qwen2Config(**common), Qwen2ForCausalLM),
        "qwen3": (Qwen3Config(**common, head_dim=hidden // 4), Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig(**common, head_dim=hidden // 4, **MOE), Qwen3MoeForCausalLM),
    }[family]
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.05)
            elif "norm" in name:
                parameter.uniform_(0.8, 1.2)
    return model.to(dtype)


def save_tiny_model(directory: str | os.PathLike, family: str, **options) -> str:
    """Write model and tokenizer to ``directory``; returns it as a string."""
    make_model(family, **options).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)
