"""OpenRLHF's rollout actor with low-bit weights that are published to it, proven, and only then sampled from."""

import asyncio
import os
import pickle
from collections.abc import Awaitable
from copy import deepcopy

from qarl_openrlhf.imports import uncollected

with uncollected():
    from qarl_openrlhf.patches import torch_cuda

    torch_cuda.apply()  # and no other patch: they import DeepSpeed and OpenRLHF's models, a fifth of what an engine took to import

    import ray
    import torch
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from torch import Tensor
    from vllm import SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.inputs import TokensPrompt
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils import random_uuid
    from vllm.v1.engine.exceptions import EngineDeadError

    from qarl_openrlhf.engine import plugin
    from qarl_openrlhf.engine.admission import Admission
    from qarl_openrlhf.engine.clean_up import CleanUp
    from qarl_openrlhf.engine.config import engine_overrides
    from qarl_openrlhf.engine.liveness import fail_when_dead
    from qarl_openrlhf.engine.response_text import ended_by_token, response_text
    from qarl_openrlhf.engine.shared_tokenizer import fetch
    from qarl_openrlhf.engine.stops import as_tokens
    from qarl_openrlhf.engine.start_error import started, why_dead
    from qarl_openrlhf.engine.state import EngineNotReady, Weights, WeightState
    from qarl_openrlhf.engine.strict_rewards import StrictSingleTurnExecutor
    from qarl_openrlhf.engine.token_versions import TokenVersions, along
    from qarl_openrlhf.quant import QuantScheme
    from qarl_openrlhf.runtime import cuda_device_count, free_port, resolve_device
    from qarl_openrlhf.sync.errors import SyncError


# OpenRLHF's class as it was before ``@ray.remote``. Ray's own modification of it would pass its identity on: Ray would take
# ours for OpenRLHF's, and a process that has looked an engine up by name could not start another one.
_RolloutActor = RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__


class QarlRolloutActor(_RolloutActor):
    """``RolloutRayActor`` that starts with dummy weights and refuses to generate until a publish has completed.

    Args, besides OpenRLHF's (which include all of ``AsyncEngineArgs``):
        qarl_name: of the engine, for messages until the learner gives it one.
        qarl_scheme: scheme string, e.g. "w4a16:g64"; a ":rollout" suffix means nothing to an engine.
        qarl_device: "cpu", "cuda" or "auto".
        qarl_stop: stop strings added to every request; the matched string stays part of the response.
        qarl_reward_timeout_s: longest time one reward of a function or server may take.
        qarl_allow_truncated_sampling: accept top_p < 1 and top_k > 0, whose distribution the learner does not compute.
    """

    async def __init__(
        self,
        *args,
        qarl_name: str = "engine",
        qarl_scheme: str = "bf16",
        qarl_device: str = "auto",
        qarl_stop: list[str] | None = None,
        qarl_allow_truncated_sampling: bool = False,
        qarl_reward_timeout_s: float = 300.0,
        **kwargs,
    ):
        plugin.register()
        self.name = qarl_name
        self.weights = WeightState()
        self.timeout_s = 120.0
        self.session = 0  # of the transport group, i.e. of the updates a failure may still speak for
        self.clean_up = CleanUp()
        self.stop = list(qarl_stop or [])
        self.tokenizers: dict = {}
        self.allow_truncated_sampling = qarl_allow_truncated_sampling
        self.ranks = kwargs.get("tensor_parallel_size", 1)
        # Ray shows an engine over several GPUs none of them: its workers are placed on theirs by bundles.
        placed = qarl_device == "cuda" and kwargs.get("distributed_executor_backend") == "ray"
        self.on_cpu = not placed and resolve_device(qarl_device) == "cpu"
        overrides = engine_overrides(
            QuantScheme.parse(qarl_scheme),
            model=kwargs["model"],
            device="cpu" if self.on_cpu else "cuda",
            tensor_parallel_size=self.ranks,
        )
        if "compilation_config" in overrides:  # joins the caller's: in its place vLLM would compile what the caller told it not to
            overrides["compilation_config"] = (kwargs.get("compilation_config") or {}) | overrides["compilation_config"]
        # vLLM's statistics, which nothing reads here, cost a fifth of what its process has to do for a token.
        settings = {"num_gpus": 0, "disable_log_stats": True, **kwargs, **overrides}
        await started(lambda: super(QarlRolloutActor, self).__init__(*args, **settings), self.name)
        fail_when_dead(self.llm, lambda: EngineNotReady(f"{self.name}: its process died{why_dead()}"))
        StrictSingleTurnExecutor.convert(self.executor, qarl_reward_timeout_s)
        # An engine of a benchmark has no tokenizer (skip_tokenizer_init), and no stop strings either.
        self.tokenizer = None if kwargs.get("skip_tokenizer_init") else self.llm.get_tokenizer()
        self.stop, self.stop_tokens = as_tokens(self.stop, self.tokenizer, self.llm.model_config) if self.stop else ([], [])
        self.admission = Admission(self.llm, lambda: self.weights.wait_ready(self.name, self.timeout_s))
        self.token_versions = TokenVersions(self.llm)

    def _configure_device_env(self, backend, bundle_indices, num_gpus):
        if self.on_cpu:  # no device to choose, though Ray may count logical GPUs
            return
        super()._configure_device_env(backend, bundle_indices, num_gpus)
        if backend == "ray":
            # vLLM 0.26 looks for the workers' port from this one + 100 upwards, by default from 100: engines of one host that
            # start together and may listen there (root) would all take the same.
            os.environ["VLLM_DP_MASTER_PORT"] = str(free_port() - 100)
        else:
            # The engine's own GPUs first, then the host's others: CUDA maps memory of a GPU (transport ipc, learner rank 0)
            # only where it is visible.
            own = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
            others = [str(i) for i in range(cuda_device_count()) if str(i) not in own]
            if own and all(gpu.isdigit() for gpu in own):
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own + others)

    # ---- sampling -----------------------------------------------------------------------------------------------------

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        """Sample one response.

        The vLLM ``RequestOutput`` also carries ``weight_versions``, the version that each token was sampled under (int, one a
        token of the response), and ``weight_version``, the oldest of them.

        EngineNotReady unless the weights are READY. A request that arrives during an update of a live engine waits for its
        end; one in flight is frozen and goes on under the new weights, or is aborted, with EngineNotReady, if it fails.
        """
        failures = await self.weights.wait_ready(self.name, self.timeout_s)
        version = self.weights.version
        params = self._prepared(sampling_params)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        with_text = params.detokenize and self.tokenizer is not None
        late_text = with_text and not params.stop
        if late_text:
            params.detokenize = False
        try:
            output = await super().generate(prompt_token_ids, params, multi_modal_data)
        except EngineDeadError:
            raise EngineNotReady(f"{self.name}: its process died while it sampled{why_dead()}") from None
        versions = self.token_versions.take(output) if output is not None else []
        if output is None or output.outputs[0].finish_reason == "abort":
            why = f"weights are {self.weights.state.value} ({self.weights.reason})"
            raise EngineNotReady(f"{self.name} aborted a request: {why}")
        self.weights.require_whole(self.name, failures)
        output.weight_versions, output.weight_version = versions, min(versions, default=version)
        if late_text or (with_text and ended_by_token(output.outputs[0])):
            # A stop string belongs to the response (_prepared), an EOS does not.
            params.include_stop_str_in_output &= not self.stop
            output.outputs[0].text = response_text(self.tokenizer, prompt_token_ids, output.outputs[0], params, self.stop_tokens)
        return output

    async def expect(self, dispatch: str, slots: list[tuple[int, int]], seed: int) -> None:
        """All samples (prompt, sample) of a dispatch that this engine has been sent; see ``Admission``."""
        self.admission.expect(dispatch, slots, seed)

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params,
        max_length: int,
        hf_tokenizer,
        num_samples: int = 1,
        images=None,
        ticket: tuple[str, int] | None = None,
    ):
        """``num_samples`` responses of the executor to one prompt.

        ticket: (dispatch, number of the prompt): the samples wait for the others of that dispatch, see :meth:`expect`.

        Each also has ``weight_versions``, one int for each of its ``observation_tokens`` (-1 where nothing was sampled), and
        ``weight_version``, the oldest of them; and, of a dispatch, ``slot``: (number of the prompt, number of the sample).
        """
        await self.weights.wait_ready(self.name, self.timeout_s)
        hf_tokenizer = await fetch(hf_tokenizer, self.tokenizers)
        # The executor looks at these before it calls generate().
        sampling_params = self._prepared(sampling_params)

        async def sample(index: int) -> dict:
            place = None if ticket is None else (ticket[0], (ticket[1], index))
            engine = _ExecutorsEngine(self, place)
            try:
                response = await self.executor.execute(
                    prompt=prompt,
                    label=label,
                    sampling_params=deepcopy(sampling_params),
                    max_length=max_length,
                    hf_tokenizer=hf_tokenizer,
                    llm_engine=engine,
                    images=images,
                )
            finally:
                if place is not None:
                    self.admission.left(*place)
            if isinstance(response, dict) and place is not None:
                response["slot"] = place[1]
            if isinstance(response, dict) and engine.sampled:
                response["weight_version"] = min(version for _, versions in engine.sampled for version in versions)
                response["weight_versions"] = along(response["observation_tokens"], response["action_ranges"], engine.sampled)
            return response

        return await asyncio.gather(*[sample(index) for index in range(num_samples)])

    def _prepared(self, params: SamplingParams) -> SamplingParams:
        """A copy that always asks for the sampled token's log-prob and never distorts the distribution behind it."""
        if (params.top_p < 1 or params.top_k > 0) and not self.allow_truncated_sampling:
            raise ValueError(
                f"top_p {params.top_p} / top_k {params.top_k} sample from a truncated distribution whose log-probs the learner "
                "does not compute: use top_p 1.0 and top_k -1"
            )
        if params.n != 1:
            raise ValueError(f"n {params.n}: one request is one response here; use num_samples of generate_responses")
        params = deepcopy(params)
        params.logprobs = 0  # the sampled token's, nothing else,
        params.flat_logprobs = True  # and as numbers, not as one object each
        params.min_tokens = 0  # min_tokens 1 would mask the EOS at the first position, which the learner does not
        params.stop_token_ids = [*(params.stop_token_ids or []), *self.stop_tokens]
        if self.stop:
            params.stop = self.stop
            params.include_stop_str_in_output = True
            params.detokenize = True
        return params

    async def probe_logprobs(self, token_ids: list[list[int]]) -> list[list[float]]:
        """log p(ids[t+1] | ids[:t+1]) at temperature 1 for each list of ids; len(ids) - 1 numbers each."""
        failures = await self.weights.wait_ready(self.name, self.timeout_s)
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

        async def probe(ids: list[int]) -> list[float]:
            output = await self._read(ids, params, failures)
            return [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]

        try:
            return await asyncio.gather(*[probe(ids) for ids in token_ids])
        except EngineDeadError:
            raise EngineNotReady(f"{self.name}: its process died while it scored a text{why_dead()}") from None

    async def probe_routing(self, token_ids: list[list[int]]) -> list | None:
        """Expert ids [len(ids), layers, k] (numpy) of each list of ids; None of a dense model or an engine that keeps none."""
        failures = await self.weights.wait_ready(self.name, self.timeout_s)
        if not self.llm.model_config.enable_return_routed_experts:
            return None
        params = SamplingParams(temperature=1.0, max_tokens=1, detokenize=False)
        outputs = await asyncio.gather(*[self._read(ids, params, failures) for ids in token_ids])
        return [output.outputs[0].routed_experts for output in outputs]

    async def _read(self, ids: list[int], params: SamplingParams, failures: int) -> RequestOutput:
        """Of a text that is not sampled, before any request that waits (``engine_args.chosen``). failures: ``wait_ready``'s."""
        async for output in self.llm.generate(TokensPrompt(prompt_token_ids=ids), params, request_id=random_uuid(), priority=-1):
            pass
        self.token_versions.take(output)
        self.weights.require_whole(self.name, failures)
        return output

    # ---- weight updates -----------------------------------------------------------------------------------------------

    async def weights_state(self) -> dict:
        """{state, version, reason, ranks}: ranks is the number of worker processes that join a transport group."""
        return {**self.weights.to_dict(), "ranks": self.ranks}

    async def init_weight_sync(self, info: dict) -> None:
        """Join the learner's transport group; blocks until all have joined.

        info: name (of this engine, for messages), group (``GroupInfo`` as a dict), rank_offset, verify, timeout_s.
        """
        self.name, self.timeout_s = info["name"], info["timeout_s"]
        if self.weights.state is Weights.UPDATING:  # its learner died in an update, this is the next one
            self.weights.fail(f"{self.weights.reason}, but the learner never finished")
            await self._clean_up()
        async with self.clean_up.lock:  # the clean-up after an earlier failure must not reach into this session
            self.session += 1
        init = {k: info[k] for k in ("group", "rank_offset", "verify")}
        request = WeightTransferInitRequest({**init, "address": ray.util.get_node_ip_address()})
        await self._step(self.llm.init_weight_transfer_engine(request))

    async def begin_update(self, version: int) -> None:
        """Freeze requests in flight, drop the KV and prefix caches, start vLLM's weight update."""
        async with self.admission.lock:
            self.weights.begin(version)
        await self._step(self._begin())

    async def _begin(self) -> None:
        # "keep" preempts what runs: its KV cache is computed anew, with the new weights, when it goes on.
        await self.llm.pause_generation(mode="keep", clear_cache=True)
        await self.llm.start_weight_update()

    async def receive_bucket(self, announced: tuple[dict, object]) -> None:
        """Receive, prove and load one bucket: (``Bucket`` as a dict, the transport's ticket)."""
        bucket, ticket = announced
        update = {"bucket": bucket, "ticket": pickle.dumps(ticket)}
        await self._step(self.llm.update_weights(WeightTransferUpdateRequest(update)))

    async def finish_update(self, version: int, sent: int) -> list[dict]:
        """Prove the model complete and go READY. sent: how many tensors the learner did. Returns each rank's receipt."""
        session = self.session
        receipts = await self._step(self.llm.finish_weight_update())
        for receipt in receipts:
            if receipt["tensors"] != sent:
                await self._fail(f"rank {receipt['rank']} got {receipt['tensors']} of {sent} tensors", session)
        if session != self.session:
            raise SyncError(f"{self.name}: version {version} was given up before it was complete")
        self.token_versions.begin(version)
        await self._step(self.llm.resume_generation())
        self.weights.complete(version)
        return [{"engine": self.name, **receipt} for receipt in receipts]

    async def abort_update(self, reason: str) -> None:
        """Give the update up, complete or not: FAILED at once, then clean up as far as the engine still answers."""
        self.weights.fail(reason)
        await self._clean_up()

    async def _step(self, call: Awaitable) -> list[dict]:
        """Await one step of vLLM's life cycle and every rank's status after it; SyncError and FAILED if any went wrong."""
        session = self.session
        try:
            await self._alive(call)
            status = await self._alive(self.llm.collective_rpc("qarl_status"))
        except Exception as error:
            await self._fail(f"{type(error).__name__}: {error}", session)
        broken = [s for s in status if s["error"]]
        if broken:
            await self._fail("; ".join(f"rank {s['rank']}: {s['error']}" for s in broken), session)
        return status

    async def _fail(self, reason: str, session: int) -> None:
        if session == self.session:  # else the learner gave this update up long ago, and a later one is under way
            self.weights.fail(reason)
            await self._clean_up()
        raise SyncError(f"{self.name}: {reason}")

    async def _clean_up(self) -> None:
        """Close vLLM's update session and abort what is in flight; a worker that still waits for a peer delays only this."""
        session = self.session
        await self.clean_up.run(self.name, self._close_session, lambda: session == self.session)

    async def _close_session(self) -> None:
        await self._alive(self.llm.collective_rpc("qarl_abort"))
        await self._alive(self.llm.pause_generation(mode="abort", clear_cache=True))
        await self._alive(self.llm.resume_generation())

    async def _alive(self, call: Awaitable):
        """Await a call to the engine core, but no longer than ``timeout_s``."""
        try:
            return await asyncio.wait_for(call, self.timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no answer from the engine's workers for {self.timeout_s:g} s") from None

    async def kernels(self) -> dict[str, str]:
        """Layer type -> the kernel that vLLM chose for it; empty on a CPU."""
        return (await self.llm.collective_rpc("qarl_kernels"))[0]

    async def memory(self) -> dict:
        """Bytes of GPU memory held by torch, the largest of all ranks: {allocated, peak}."""
        ranks = await self.llm.collective_rpc("qarl_memory")
        return {key: max(rank[key] for rank in ranks) for key in ranks[0]}

    # ---- reading back -------------------------------------------------------------------------------------------------

    async def read_tensors(self, names: list[str] | None = None) -> dict[str, Tensor]:
        """{checkpoint name: tensor} out of the engine's own parameters, un-fused and put together from all ranks."""
        return self._assemble(await self.llm.collective_rpc("qarl_read_tensors", args=(names,)))

    async def effective_weights(self, names: list[str] | None = None) -> dict[str, Tensor]:
        """{layer name: [N, K] in the model's dtype}: what the engine's products multiply by, of quantized layers."""
        return self._assemble(await self.llm.collective_rpc("qarl_effective_weights", args=(names,)))

    @staticmethod
    def _assemble(ranks: list[bytes]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for blob in ranks:
            for name, (shape, part, piece) in pickle.loads(blob).items():
                if name not in tensors:
                    tensors[name] = torch.zeros(shape, dtype=piece.dtype)
                part.of(tensors[name]).copy_(piece)
        return tensors


class _ExecutorsEngine:
    """What an executor gets as its engine: the actor, remembering the tokens of its requests and their weight versions.

    Its first request enters the engine at its ``place`` (dispatch, slot).
    """

    def __init__(self, actor: QarlRolloutActor, place: tuple | None):
        self.actor, self.place = actor, place
        self.sampled: list[tuple[list[int], list[int]]] = []

    async def generate(self, *args, **kwargs):
        if self.place is not None:
            await self.actor.admission.enter(*self.place)
            self.place = None
        output = await self.actor.generate(*args, **kwargs)
        self.sampled.append((output.outputs[0].token_ids, output.weight_versions))
        return output

    def __getattr__(self, name):
        return getattr(self.actor, name)
