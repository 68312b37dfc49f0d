"""A tokenizer that needs no download and no training: one token a byte, and a few whole words.

A vocabulary of 320 makes the output layer of a small model as small as the rest of it: most of SmolLM2's 135M parameters are
embeddings of 49152 tokens that sums have no use for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers is imported where it is used: it takes seconds
    from transformers import PreTrainedTokenizerFast

END, PAD = "<|im_end|>", "<|pad|>"
WORDS = ("<answer>", "</answer>")  # ordinary text, one token each
VOCABULARY = 320  # a multiple of 64, so that any tensor parallel size up to 64 divides it


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, END (end of text), PAD, WORDS, and unused tokens up to VOCABULARY: whatever a model samples can be decoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.add_special_tokens([f"<|unused_{i}|>" for i in range(VOCABULARY - tokenizer.get_vocab_size())])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False, padding_side="left"
    )
