"""Tiny random models of every supported family and their tokenizers: the smallest things that the whole stack runs.

    save_tiny_model   a Hugging Face directory with a trained tokenizer: what a run, a dry run or an export starts from
    tiny, tiny_moe    in memory, weights far from their initial values: what the quantizer's tests want
    random_model      any other shape (the engines' tests have their own, with a vocabulary that vLLM pads)
"""

import os
from collections.abc import Callable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config, Qwen3MoeConfig

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
FAMILIES = ("llama", "qwen2", "qwen3")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
SIZE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
Spread = Callable[[str, torch.nn.Parameter], None]  # moves a parameter, by name, away from where a new model has it


def random_model(family: str, spread: Spread, *, seed: int = 0, dtype=torch.bfloat16, **fields):
    """A causal LM of two layers (and four experts), its head size the hidden size over its heads. fields: of its config."""
    fields = SIZE | (MOE if family == "qwen3_moe" else {}) | fields
    if family.startswith("qwen3"):
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**fields), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread(name, parameter)
    return model.to(dtype)


# ---- directories ---------------------------------------------------------------------------------------------------------

VOCABULARY = 512


def make_tokenizer() -> PreTrainedTokenizerFast:
    """BPE trained on sums, with chat tokens."""
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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text can be sampled."""
    specials = ["<unk>", "<eos>", "<pad>"]
    vocab = {token: i for i, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def make_model(family: str, *, hidden: int = 64, layers: int = 2, tied: bool = False, seed: int = 0, dtype=torch.bfloat16):
    """A random causal LM: head size hidden/4, 4 heads, 2 key-value heads, MLP 2 x hidden; biases and norms are not trivial."""

    def spread(name: str, parameter) -> None:
        if name.endswith("bias"):
            parameter.normal_(0, 0.05)
        elif "norm" in name:
            parameter.uniform_(0.8, 1.2)

    return random_model(
        family,
        spread,
        seed=seed,
        dtype=dtype,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=3,
    )


def save_tiny_model(directory: str | os.PathLike, family: str, **options) -> str:
    """Write model and tokenizer to ``directory``; returns it as a string. options: of :func:`make_model`."""
    make_model(family, **options).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


# ---- in memory -----------------------------------------------------------------------------------------------------------

LAYERS = 2
LINEARS = 7 * LAYERS
MOE_LAYERS = 6 * LAYERS  # q, k, v, o, and two stacked expert weights


def tiny(family: str = "llama", dtype=torch.bfloat16, **fields):
    """A model whose weights, biases and norms are all far from their initial values."""

    def spread(name: str, parameter) -> None:
        if parameter.dim() == 1:
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
        else:
            parameter.mul_(3)

    defaults = dict(
        vocab_size=160,
        hidden_size=128,
        intermediate_size=256,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    return random_model(family, spread, seed=1, dtype=dtype, **defaults | fields)


def tiny_moe(dtype=torch.bfloat16, **fields):
    """Qwen3-MoE: two layers of four experts, two of them a token."""
    return tiny("qwen3_moe", dtype, **{"initializer_range": 0.05} | fields)


def tokens(rows: int = 3, length: int = 17) -> torch.Tensor:
    """int64 [rows, length], the same ones each time, for :func:`tiny`'s vocabulary."""
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(5))


def loss_of(model) -> torch.Tensor:
    ids = tokens()
    return model(input_ids=ids, labels=ids).loss
