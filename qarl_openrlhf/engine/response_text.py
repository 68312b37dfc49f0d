"""The text of a response, made once when it is complete.

vLLM turns every token into text as it comes, and every log-prob's token, and builds an output a token and request: half of the
time that the engine's own process has for a token, which is what limits a rollout of hundreds of sequences.
"""

from collections.abc import Collection
from types import SimpleNamespace

from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.v1.engine.detokenizer import IncrementalDetokenizer


def ended_by_token(output: CompletionOutput) -> bool:
    """Whether an EOS or a stop token ended a response, and no stop string."""
    return output.finish_reason == "stop" and not isinstance(output.stop_reason, str)


def response_text(
    tokenizer, prompt_ids: list[int], output: CompletionOutput, params: SamplingParams, stop_tokens: Collection[int] = ()
) -> str:
    """What vLLM's own detokenizer makes of all tokens of a response that no stop string ended, given as it would be one by one.

    params: those of the request; ``detokenize`` is not looked at. stop_tokens: ids that belong to the response though they ended
    it, as the text of a stop string does; vLLM leaves any token out that ended one.
    """
    request = SimpleNamespace(
        request_id="",
        external_req_id="",
        prompt_token_ids=list(prompt_ids),
        prompt_embeds=None,
        sampling_params=params,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    ids = list(output.token_ids)
    leave_last_out = output.finish_reason == "stop" and not (ids and ids[-1] in stop_tokens)
    detokenizer.update(ids, leave_last_out)
    return detokenizer.get_next_output_text(finished=True, delta=False)
