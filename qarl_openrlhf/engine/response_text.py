"""The text of a response, made once when it is complete.

vLLM turns every token into text as it comes, and every log-prob's token, and builds an output a token and request: half of the
time that the engine's own process has for a token, which is what limits a rollout of hundreds of sequences.
"""

from types import SimpleNamespace

from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.v1.engine.detokenizer import IncrementalDetokenizer


def response_text(tokenizer, prompt_ids: list[int], output: CompletionOutput, params: SamplingParams) -> str:
    """What vLLM's own detokenizer makes of all tokens of a finished response, given as it would be one by one.

    params: those of the request, without stop strings; ``detokenize`` is not looked at.
    """
    request = SimpleNamespace(
        request_id="",
        external_req_id="",
        prompt_token_ids=list(prompt_ids),
        prompt_embeds=None,
        sampling_params=params,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(list(output.token_ids), output.finish_reason == "stop")
    return detokenizer.get_next_output_text(finished=True, delta=False)
