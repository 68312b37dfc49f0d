"""Stop strings as stop tokens, where that is the same thing."""

from transformers import PreTrainedTokenizerBase
from vllm.config import ModelConfig

# vLLM's scheduler goes through the list for every token that it samples.
MAX_TOKENS = 1024


def as_tokens(stop: list[str], tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> tuple[list[str], list[int]]:
    """(strings that stay, token ids that stand for the others).

    A stop string of one ASCII character lies within one token, so that the tokens that contain it end the same responses at the
    same place. vLLM's scheduler stops at tokens itself; strings are searched in another process, while the engine goes on for a
    step or two, which makes what shares a forward pass, and with it the last bits of the log-probs, differ from run to run.
    An EOS is none of them, though its name may have the character: it ends a response by itself and is not part of its text.
    """
    single = [text for text in stop if len(text) == 1 and text.isascii() and text != " "]
    if not single:
        return stop, []
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    ends = model.try_get_generation_config().get("eos_token_id")
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    tokens = [i for i, text in enumerate(texts) if i not in ends and any(character in text for character in single)]
    if not tokens or len(tokens) > MAX_TOKENS:
        return stop, []
    return [text for text in stop if text not in single], tokens
