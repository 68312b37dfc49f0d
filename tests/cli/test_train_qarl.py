"""The command line: OpenRLHF's flags and ours, presets, refusals, dry run. Nothing is started."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl_openrlhf import config
from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.cli.host import HostCommandLine
from qarl_openrlhf.engine.engine_args import chosen, engine_args
from qarl_openrlhf.metrics.writer import MetricsWriter
from qarl_openrlhf.quant.scheme import QuantScheme
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", hidden=128)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text('{"input": "1 + 1 ="}\n' * 1024)
    return str(path)


@pytest.fixture
def base(model, prompts):
    return [
        "--device", "cpu", "--actor.model_name_or_path", model, "--data.prompt_dataset", prompts,
        "--reward.remote_url", str(Path(__file__).parents[1] / "tiny_reward.py"), "--vllm.num_engines", "1", "--actor.num_gpus_per_node", "1",
        "--ref.num_gpus_per_node", "1", "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "8",
    ]  # fmt: skip


def refusal(argv, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        train_qarl.resolve(argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["bf16", "w4a16:g32"])
@pytest.mark.parametrize("room", [None, 100])
def test_what_a_run_has_written_is_told_whether_or_not_its_report_can_be(tmp_path, capsys, scheme, room):
    """A limit on the size of a file stands for a full disk: writing fails with an OSError either way."""
    writer = MetricsWriter(str(tmp_path))
    for step in (1, 2, 3):
        writer.write(step, {"rollout/reward_mean": 0.1 * step, "timing/step_total": 1.0})
    args = SimpleNamespace(
        quant=SimpleNamespace(scheme=scheme), metrics=SimpleNamespace(dir=str(tmp_path)), ckpt=SimpleNamespace(output_dir="saved")
    )
    import qarl_openrlhf.report  # noqa: F401  what an import writes is not to be limited

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room or limits[0], limits[1]))
    try:
        if room:
            with pytest.raises(SystemExit) as stopped:
                train_qarl.finish(args)
        else:
            train_qarl.finish(args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().out
    assert "\nmodel: saved\n" in f"\n{said}" and ("quantized checkpoint" in said) == (scheme != "bf16")
    assert (tmp_path / "report.txt").exists() == ("run directory: " in said) == (room is None)
    if room:
        assert re.fullmatch(
            rf"train_qarl: error: training is done, but its report could not be written to {tmp_path}: .*File too large.*; "
            rf"python -m qarl_openrlhf.cli.report {tmp_path} --out DIRECTORY writes it elsewhere", stopped.value.code
        )  # fmt: skip


def test_every_openrlhf_flag_keeps_its_default():
    host = HostCommandLine()
    theirs = vars(host.parser.parse_args([]))
    train_qarl.add_flags(host.parser)
    both = vars(host.parser.parse_args([]))
    assert {name: both[name] for name in theirs} == theirs
    assert len(theirs) > 140  # OpenRLHF 0.11.2 has that many; a parser cut short would have fewer


def test_engine_arguments_reach_the_engine_and_the_plan(base, capsys):
    given = {"max_num_seqs": 7, "kv_cache_memory_bytes": 3 * 2**30}
    argv = [*base[2:], "--vllm.engine_args", json.dumps(given)]
    args, _, _ = train_qarl.resolve(["--device", "cpu", *argv])
    assert engine_args(args) == given
    train_qarl.main(["--device", "cuda", "--dry_run", "--dry_run_gpu_gb", "80", "--data.max_len", "256", *argv])
    out = capsys.readouterr().out
    assert re.search(r"KV cache +3\.0 +3\.0$", out, re.MULTILINE), out


def test_three_arms_differ_by_one_flag(base):
    plans = {}
    for scheme in ("bf16", "w4a16:g64:rollout", "w4a16:g64"):
        args, _, resources = train_qarl.resolve([*base, "--quant.scheme", scheme])
        plans[args.quant.scheme] = str(resources)
    assert list(plans) == ["bf16", "w4a16:g64:rollout", "w4a16:g64"] and len(set(plans.values())) == 1


@pytest.mark.parametrize(
    "extra, places",
    [
        ([], ("./ckpt", "./ckpt", "./ckpt/checkpoints_ppo_ray")),
        (["--metrics.dir", "runs/mine"], ("runs/mine", "runs/mine/model", "runs/mine/checkpoints")),
        (["--metrics.dir", "runs/mine", "--ckpt.output_dir", "here"], ("runs/mine", "here", "runs/mine/checkpoints")),
        (["--ckpt.output_dir", "here"], ("here", "here", "./ckpt/checkpoints_ppo_ray")),
    ],
)
def test_the_model_of_a_run_lies_below_its_directory(base, extra, places):
    args, _, _ = train_qarl.resolve([*base, *extra])
    assert (args.metrics.dir, args.ckpt.output_dir, args.ckpt.path) == places


def test_without_our_flags_openrlhf_is_left_as_it_is(base):
    args, _, _ = train_qarl.resolve(base)
    assert args.objective.name is None and args.quant.scheme == "bf16" and args.algo.kl.init_coef == 0.01


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--quant.scheme", "w3a16"], "w4a16"),
        (["--vllm.engine_args", "max_num_seqs=512"], "--vllm.engine_args: not JSON"),
        (["--vllm.engine_args", "[1]"], "--vllm.engine_args: a JSON object"),
        (["--vllm.engine_args", '{"max_num_seq": 8}'], "--vllm.engine_args: vLLM has no engine argument max_num_seq; did you mean max_num_seqs?"),
        (["--vllm.engine_args", '{"max_num_seqs": "four"}'], 'max_num_seqs is "four"; vLLM takes int or null there'),
        (["--vllm.engine_args", '{"max_num_seqs": 0}'], "max_num_seqs is 0; at least 1"),
        (["--vllm.engine_args", '{"kv_cache_memory_bytes": -1}'], "at least 1 is needed"),
        (["--vllm.engine_args", '{"load_format": "auto"}'], "load_format is not to be set there"),
        (["--vllm.engine_args", '{"override_generation_config": {"temperature": 0.1}}'], "use the --rollout flags"),
        (["--vllm.engine_args", '{"tokenizer": "x"}'], "use --actor.model_name_or_path"),
        (["--vllm.engine_args", '{"max_num_seqs": NaN}'], "NaN is no number"),
        (["--vllm.engine_args", '{"max_num_seqs": 1, "max_num_seqs": 2}'], "max_num_seqs is given twice"),
        (["--vllm.engine_args", '{"spec_method": "ngram"}'], "a draft model would not get the learner's weights"),
        (["--vllm.engine_args", '{"enable_expert_parallel": true, "enable_eplb": true}'], "enable_eplb is not to be set there; use nothing: a push writes expert 3 to place 3"),
        (["--vllm.engine_args", '{"eplb_config": {"num_redundant_experts": 2}}'], "eplb_config is not to be set there"),
        (["--vllm.engine_args", '{"enable_elastic_ep": true}'], "enable_elastic_ep is not to be set there"),
        (["--vllm.engine_args", '{"expert_placement_strategy": "round_robin"}'], "enable_expert_parallel alone splits them in order"),
        (["--vllm.engine_args", '{"tensor_parallel_size": 2}'], "use --vllm.tensor_parallel_size"),
        (["--quant.scheme", "w4a16:g16"], "w4a16:g32"),
        (["--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", "8", "--rollout.micro_batch_size", "16"], "8 responses in micro-batches of --rollout.micro_batch_size 16 leave some of the 1 processes (--actor.num_nodes x --actor.num_gpus_per_node) without one: use --rollout.micro_batch_size 8 or less"),
        (["--quant.scheme", "fp8"], "no fp8 kernel for CPUs"),
        (["--quant.scheme", "w4a16", "--ds.param_dtype", "fp16"], "--ds.param_dtype fp16 is not supported: the engines' weights are BF16"),
        (["--quant.scheme", "w4a16:rollout", "--ds.param_dtype", "fp16"], "use bf16"),
        (["--quant.scheme", "bf16", "--ds.param_dtype", "fp16"], "use bf16"),
        (["--quant.scheme", "w4a16", "--ds.param_dtype", "fp16", "--quant.allow_fp16"], "unrecognized arguments: --quant.allow_fp16"),
        (["--quant.scheme", "w4a16", "--ds.load_in_4bit"], "NF4"),
        (["--quant.scheme", "bf16", "--ds.load_in_4bit"], "NF4"),
        (["--quant.scheme", "w4a16", "--ds.lora.rank", "8"], "full weights"),
        (["--quant.scheme", "bf16", "--ds.lora.rank", "8"], "full weights"),
        (["--quant.scheme", "bf16", "--ds.tensor_parallel_size", "2"], "use --ds.zero_stage 3"),
        (["--quant.scheme", "w4a16", "--ds.tensor_parallel_size", "2"], "use --ds.zero_stage 3"),
        (["--objective.name", "tbpo", "--actor.policy_loss_type", "gspo"], "drop --actor.policy_loss_type"),
        (["--objective.name", "tbpo", "--algo.advantage.is_correction_level", "token"], "is_correction_level"),
        (["--objective.name", "grpo_tis", "--actor.eps_clip_low_high", "0.2", "0.28"], "drop --actor.eps_clip_low_high (it has --objective."),
        (["--objective.name", "grpo_tis", "--actor.eps_clip", "0.3"], "drop --actor.eps_clip "),
        (["--objective.name", "grpo_tis", "--actor.dual_clip", "3"], "drop --actor.dual_clip "),
        (["--objective.name", "grpo_tis", "--actor.loss_agg_mode", "seq-mean-token-mean"], "drop --actor.loss_agg_mode "),
        (
            ["--actor.num_gpus_per_node", "2", "--rollout.batch_size", "12", "--rollout.n_samples_per_prompt", "8", "--rollout.micro_batch_size", "32", "--train.batch_size", "32"],
            "give the 2 processes (--actor.num_nodes x --actor.num_gpus_per_node) 64 and 32 responses, which fill 4 and 2 optimizer steps; as all must make the same number, the rest would be dropped: use --rollout.micro_batch_size 24",
        ),
        (
            ["--actor.num_gpus_per_node", "4", "--rollout.batch_size", "20", "--rollout.n_samples_per_prompt", "8", "--rollout.micro_batch_size", "32", "--train.batch_size", "32"],
            "64 and 32 and 0 responses",
        ),
        (
            ["--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2", "--rollout.batch_size", "12", "--rollout.n_samples_per_prompt", "8", "--rollout.micro_batch_size", "32", "--train.batch_size", "32"],
            "give the 2 processes (--critic.num_nodes x --critic.num_gpus_per_node) 64 and 32 responses",
        ),
        (
            ["--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "4", "--rollout.batch_size", "12", "--rollout.n_samples_per_prompt", "8", "--rollout.micro_batch_size", "32"],
            "leave some of the 4 processes (--critic.num_nodes x --critic.num_gpus_per_node) without one: use --rollout.micro_batch_size 24",
        ),
        (
            ["--algo.advantage.estimator", "gae", "--actor.num_gpus_per_node", "4", "--critic.num_gpus_per_node", "3", "--train.dynamic_batch_enable"],
            "in 4 parts, one a policy process, and those do not divide into 3 critic processes (--critic.num_nodes x --critic.num_gpus_per_node): use 1 or 2 or 4",
        ),
        (["--objective.name", "no_such"], "tbpo"),
        (["--objective.name", "tbpo", "--objective.is_cap", "-1"], "is_cap"),
        (["--objective.band_scale", "2"], "without --objective.name"),
        (["--rollout.top_p", "0.9"], "allow_truncated_sampling"),
        (["--eval.steps", "5"], "--eval.steps 5 evaluates nothing without held-out prompts: add --eval.dataset FILE"),
        (["--eval.dataset", "held.jsonl"], "--eval.dataset held.jsonl is never evaluated: add --eval.steps N"),
        (["--objective.name", "tbpo", "--algo.kl.use_loss"], "--algo.kl.use_loss without a KL term, as --algo.kl.init_coef is 0: add"),
        (["--objective.name", "tbpo", "--algo.kl.target", "0.1"], "--algo.kl.target 0.1 without a KL term, as --algo.kl.init_coef is 0: add"),
        (["--algo.kl.target", "0.1", "--algo.kl.init_coef", "0"], "--algo.kl.target 0.1 without a KL term"),
        (["--critic.freezing_steps", "5"], "--algo.advantage.estimator group_norm has none: nothing would be trained in those steps"),
        (
            ["--reward.overlong_buffer_len", "64", "--rollout.max_new_tokens", "32"],
            "--reward.overlong_buffer_len 64 is more tokens than a response may have (--rollout.max_new_tokens 32)",
        ),
        (
            ["--train.async_enable", "--eval.dataset", "held.jsonl", "--eval.steps", "5", "--ckpt.best_metric_key", "accuracy"],
            "when an evaluation has ended, the weights it judged have been trained further",
        ),
        (["--ds.ring_attn_size", "2"], "--ds.ring_attn_size 2 is not supported"),
        (["--sync.transport", "nccl"], "does not work on a CPU: use gloo"),
        (["--vllm.num_engines", "0"], "--vllm.num_engines is missing: at least 1"),
        (["--reward.remote_url", ""], "no reward"),
        (["--data.prompt_dataset", ""], "--data.prompt_dataset is missing"),
        (["--preset", "no_such"], "unknown preset 'no_such'"),
        (["--quant.scheme", "w8a8", "--vllm.tensor_parallel_size", "2"], "not be aligned"),
        (["--objective.name", "onpolicy_grpo"], "one optimizer step a rollout"),
        (["--sync.probe_every", "0"], "at least 1"),
        (["--actor.lr_scheduler", "nope"], "cosine_with_min_lr"),
        (["--rollout.n_samples_per_prompt", "1"], "--rollout.n_samples_per_prompt 1: --algo.advantage.estimator group_norm compares the responses"),
        (  # before any advice on micro-batches, which more responses would make another
            ["--rollout.n_samples_per_prompt", "1", "--rollout.batch_size", "2", "--rollout.micro_batch_size", "16"],
            "--rollout.n_samples_per_prompt 1: --algo.advantage.estimator group_norm compares the responses",
        ),
        (
            ["--rollout.n_samples_per_prompt", "1", "--algo.advantage.estimator", "reinforce", "--algo.dynamic_filtering_enable"],
            "--rollout.n_samples_per_prompt 1: --algo.dynamic_filtering_enable judges prompts by the mean",
        ),
    ],
)  # fmt: skip
def test_wrong_combinations_are_refused_before_anything_starts(base, extra, message, capsys):
    assert message in refusal([*base, *extra], capsys)


def test_a_critic_that_is_not_trained_has_no_say_in_the_batches(base):
    sizes = ["--critic.num_gpus_per_node", "3", "--rollout.batch_size", "4", "--rollout.micro_batch_size", "16", "--train.batch_size", "32"]
    train_qarl.resolve([*base, *sizes])


def test_a_kl_term_that_is_asked_for_is_there(base):
    ours = ["--objective.name", "tbpo"]
    for none in ([], ["--algo.kl.use_loss", "--algo.kl.init_coef", "0"]):
        assert train_qarl.resolve([*base, *ours, *none])[0].algo.kl.init_coef == 0
    args, _, _ = train_qarl.resolve([*base, *ours, "--algo.kl.use_loss", "--algo.kl.init_coef", "0.02", "--algo.kl.target", "0.1"])
    assert args.algo.kl.use_loss and args.algo.kl.init_coef == 0.02
    args, _, _ = train_qarl.resolve([*base, "--algo.kl.use_loss"])  # OpenRLHF's own loss has its own default
    assert args.algo.kl.init_coef == 0.01


def test_packing_without_flash_attn_takes_our_attention(base):
    for flag in ("--ds.packing_samples", "--train.dynamic_batch_enable"):
        args, _, _ = train_qarl.resolve([*base, flag])
        assert args.ds.packing_samples and args.ds.attn_implementation == "qarl_varlen"


def test_an_asynchronous_run_keeps_no_best_checkpoint(base):
    args, _, _ = train_qarl.resolve([*base, "--train.async_enable", "--eval.dataset", "held.jsonl", "--eval.steps", "5"])
    assert args.ckpt.best_metric_key == "none"


def test_a_partial_rollout_lets_probes_go_first(base):
    assert chosen(train_qarl.resolve([*base, "--train.async_enable"])[0]) == {}
    partial = [*base, "--train.async_enable", "--train.partial_rollout_enable"]
    assert chosen(train_qarl.resolve(partial)[0]) == {"scheduling_policy": "priority"}
    own = ["--vllm.engine_args", '{"scheduling_policy": "fcfs", "max_num_seqs": 64}']
    assert chosen(train_qarl.resolve([*partial, *own])[0]) == {"scheduling_policy": "fcfs", "max_num_seqs": 64}


def test_layers_that_do_not_fit_the_scheme_are_named(tmp_path, base, capsys):
    odd = save_tiny_model(tmp_path, "llama", hidden=96)
    base[base.index("--actor.model_name_or_path") + 1] = odd
    text = refusal([*base, "--quant.scheme", "w4a16:g128"], capsys)
    assert "model.layers.0.self_attn.q_proj" in text and "w4a16:g32" in text


def test_missing_model_is_named(base, capsys):
    base[base.index("--actor.model_name_or_path") + 1] = "/no/such/model"
    assert "/no/such/model" in refusal([*base, "--quant.scheme", "w4a16"], capsys)


def test_dry_run_prints_configuration_resources_and_plan(base, capsys):
    train_qarl.main([*base, "--quant.scheme", "w4a16:g64", "--objective.name", "tbpo", "--data.max_len", "512", "--dry_run"])
    text = capsys.readouterr().out
    assert "--quant.scheme w4a16:g64" in text and "processes on the CPU (actor 1" in text
    assert "model.layers.*.mlp.down_proj" in text and "lm_head" in text


def test_a_run_and_its_dry_run_fail_on_missing_files_and_a_plan_for_another_card_only_says_so(base, capsys):
    base[base.index("--data.prompt_dataset") + 1] = "/no/such.jsonl"
    base[base.index("--reward.remote_url") + 1] = "no_such_reward.py"
    for extra in ([], ["--dry_run"]):
        with pytest.raises(SystemExit) as stopped:
            train_qarl.main([*base, "--data.max_len", "512", *extra])
        text = capsys.readouterr().err
        assert stopped.value.code == 2 and "/no/such.jsonl does not exist" in text and "no_such_reward.py does not exist" in text
    train_qarl.main([*base, "--data.max_len", "512", "--dry_run", "--dry_run_gpu_gb", "80"])
    assert "note: on this machine, --data.prompt_dataset /no/such.jsonl" in capsys.readouterr().out


def test_user_objective_brings_its_hyperparameters(base, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from qarl_openrlhf.objectives import Surrogate, objective\n\n\n"
        "@objective(level='token', mean='tokens', is_weight='none')\n"
        "def mine(units, *, steepness: float = 2.0) -> Surrogate:\n    'A surrogate.'\n    return Surrogate(steepness * units.log_ratio * units.advantages)\n"
    )
    args, _, _ = train_qarl.resolve([*base, "--objective.name", f"{path}:mine", "--objective.steepness", "3"])
    assert args.objective.hyperparameters == {"steepness": 3.0}


@pytest.mark.parametrize(
    "extra, scale, note",
    [
        (["--rollout.max_new_tokens", "64"], 16.0, "16 = sqrt(16384 / 64), 64 from --rollout.max_new_tokens: the longest"),
        (["--rollout.max_new_tokens", "64", "--preset_length", "16"], 32.0, "32 = sqrt(16384 / 16), 16 from --preset_length"),
        (["--rollout.max_new_tokens", "64", "--objective.band_scale", "5"], 5.0, None),
    ],
)
def test_a_short_preset_says_which_length_its_bands_are_for(base, extra, scale, note):
    args, notes, _ = train_qarl.resolve([*base, "--preset", "tbpo_short", *extra])
    assert args.objective.hyperparameters["band_scale"] == scale
    told = [n for n in notes if "band_scale" in n]
    assert told == [] if note is None else len(told) == 1 and note in told[0]
    assert ("may be narrow" in str(told)) == ("longest" in str(note))


def test_a_short_preset_without_any_length_names_the_flags(base, capsys):
    assert "--preset_length or --rollout.max_new_tokens" in refusal([*base, "--preset", "tbpo_short"], capsys)


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", "--quant.scheme", "nonsense"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "nonsense" in done.stderr


@pytest.mark.parametrize(
    "scheme, capability, works",
    [("fp8", (8, 9), True), ("fp8", (8, 0), False), ("w4a8", (9, 0), True), ("w4a8", (10, 0), False), ("w4a16", (7, 5), True)],
)
def test_schemes_that_a_card_cannot_run_are_refused(scheme, capability, works):
    if works:
        config.check_card(QuantScheme.parse(scheme), capability, "a card")
    else:
        with pytest.raises(config.ConfigError, match=f"{scheme}.*a card has compute capability.*use "):
            config.check_card(QuantScheme.parse(scheme), capability, "a card")


@pytest.mark.parametrize("extra, transport", [([], "nccl"), (["--train.colocate_all"], "ipc")])
def test_on_gpus_the_transport_follows_the_placement(base, extra, transport):
    args, _, _ = train_qarl.resolve([*base, *extra])
    assert args.sync.transport == "gloo"
    args.sync.transport = "auto"
    assert config.choose_transport(args, "cuda") == transport
    args.sync.transport = "ipc" if transport == "nccl" else "nccl"
    with pytest.raises(config.ConfigError, match=f"use {transport}"):
        config.choose_transport(args, "cuda")
    args.sync.transport, args.sync.verify = "auto", "readback"
    with pytest.raises(config.ConfigError, match="use checksum"):
        config.choose_transport(args, "cuda")


def test_heads_that_the_cpu_engine_does_not_know(base, tmp_path, capsys):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from qarl_openrlhf.planning.architecture import CPU_HEAD_SIZES

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    small = save_tiny_model(tmp_path / "small", "qwen3", hidden=64)
    with pytest.raises(SystemExit) as stopped:
        train_qarl.main([*base, "--actor.model_name_or_path", small, "--data.max_len", "64", "--rollout.max_new_tokens", "8", "--dry_run"])
    assert stopped.value.code == 2 and "has heads of size 16: vLLM's attention on a CPU knows 32, 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    "scheme, typed, tolerance", [("w4a16", [], 0.3), ("bf16", [], 0.3), ("w8a8", [], 1.0), ("w8a8:rollout", [], 1.0), ("w8a8", ["0.2"], 0.2)]
)
def test_a_probe_allows_for_what_8_bit_activations_do(base, scheme, typed, tolerance):
    """At 0.3, sound w8a8 and fp8 runs of SmolLM2 on a card were ended by their probe, most of them in their first three publishes."""
    flags = [word for value in typed for word in ("--sync.probe_tol", value)]
    args, notes, _ = train_qarl.resolve([*base, "--quant.scheme", scheme, "--dry_run", *flags])
    assert args.sync.probe_tol == tolerance
    assert any("--sync.probe_tol 1.0: " in note for note in notes) == (tolerance == 1.0)
