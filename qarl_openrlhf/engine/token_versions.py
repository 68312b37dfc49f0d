"""Which weight version each token was sampled under, counted by ourselves and exact to the token."""

import time
from bisect import bisect_right

from vllm.outputs import RequestOutput

from qarl_openrlhf.patches.replacing import original, replace


class TokenVersions:
    """Stamps the tokens of one engine, in the order and with the times at which its core gave them out.

    An update pauses generation with mode "keep". vLLM's core answers that call when no forward is under way and every token of
    the old weights has been given out; the first token of the new ones is sampled after the call to resume. So a time taken
    between the two separates them. How far this process has got with what the core gave out does not matter: vLLM marks
    each batch of tokens with the core's ``time.monotonic()``, one clock for all processes of a host.

    Args:
        llm: vLLM's ``AsyncLLM``; its output processor's ``process_outputs`` is wrapped. PatchError names what a vLLM lacks of it.
    """

    def __init__(self, llm):
        processor = original(llm, "output_processor")
        self._times: list[float] = []
        self._versions: list[int] = []
        self._stamps: dict[str, list[int]] = {}
        original(processor, "request_states")
        self._processor, self._process = processor, original(processor, "process_outputs")
        replace(processor, "process_outputs", self._stamped)

    def begin(self, version: int) -> None:
        """Tokens given out from now on are ``version``'s. Called while generation is paused."""
        self._times.append(time.monotonic())
        self._versions.append(version)

    def _stamped(self, outputs, timestamp: float | None = None, *args, **kwargs):
        for output in outputs:
            state = self._processor.request_states.get(output.request_id)
            if state is not None and output.new_token_ids:
                index = bisect_right(self._times, timestamp) - 1
                version = self._versions[index] if index >= 0 else -1
                self._stamps.setdefault(state.external_req_id, []).extend([version] * len(output.new_token_ids))
        return self._process(outputs, timestamp, *args, **kwargs)

    def take(self, output: RequestOutput) -> list[int]:
        """The version of each token of a request's last output, which is forgotten here; -1 before the first update."""
        stamps, tokens = self._stamps.pop(output.request_id, []), output.outputs[0].token_ids
        if len(stamps) != len(tokens):
            raise RuntimeError(f"request {output.request_id}: {len(stamps)} tokens were stamped, {len(tokens)} came out")
        return stamps


def along(tokens: list[int], ranges: list[tuple[int, int]], sampled: list[tuple[list[int], list[int]]]) -> list[int]:
    """Versions [len(tokens)] of an executor's response; -1 where the engine sampled nothing that is still there.

    Args:
        tokens: prompt, responses and what an environment put between them.
        ranges: [start, end) of the responses.
        sampled: (token ids, versions) of each request that the executor made, in order. An agent may have dropped some.
    """
    versions = [-1] * len(tokens)
    first = 0
    for start, end in ranges:
        for i in range(first, len(sampled)):
            ids, stamps = sampled[i]
            if list(ids) == list(tokens[start:end]):
                versions[start:end], first = stamps, i + 1
                break
    return versions
