"""Which command each run of an ablation gets, and what is refused before anything starts."""

import subprocess

import pytest

from qarl_openrlhf.ablation.plan import PlanError, PlannedRun, make_plan, split_flags
from qarl_openrlhf.ablation.status import is_finished
from qarl_openrlhf.cli import ablate_objectives, train_qarl
from qarl_openrlhf.report.discover import Identity
from tests.tiny_models import save_tiny_model

ALL_ARMS = ablate_objectives.PAPER_ARMS.split(",")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    model = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", hidden=128)
    return [
        "--device", "cpu", "--actor.model_name_or_path", model, "--data.prompt_dataset", "prompts.jsonl",
        "--reward.remote_url", "reward.py", "--vllm.num_engines", "1", "--actor.num_gpus_per_node", "1",
        "--ref.num_gpus_per_node", "1", "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "8",
        "--rollout.batch_size", "4", "--train.batch_size", "8", "--train.micro_batch_size", "8", "--rollout.stop", "\n",
    ]  # fmt: skip


def plan(arms, shared, out, schemes=("w4a16",), seeds=(0,)):
    return make_plan(arms, list(schemes), list(seeds), shared, out, rollout_samples=32)


def test_dry_run_prints_every_command_and_each_is_one_that_train_qarl_takes(shared, tmp_path, capsys):
    out = tmp_path / "ablation"
    matrix = ["--schemes", "bf16,w4a16:g64:rollout,w4a16:g64", "--seeds", "0,1", "--out", str(out), "--dry_run"]
    ablate_objectives.main([*matrix, *shared, "--objective.band_scale", "64", "--objective.is_low", "0.5"])
    printed = capsys.readouterr()
    commands = printed.out.splitlines()
    assert len(commands) == len(ALL_ARMS) * 3 * 2 and not out.exists()
    # a shell reads every line back, the newline of --rollout.stop included
    script = "".join(f"printf '%s\\0' {command}; printf '\\1'\n" for command in commands)
    read = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\1")
    seen = set()
    for line in read[:24]:
        words = line.split("\0")[:-1]
        words = words[words.index("qarl_openrlhf.cli.train_qarl") + 1 :]
        if "0" == words[words.index("--train.seed") + 1]:
            args, _, _ = train_qarl.resolve(words)
            seen.add((args.objective.name, args.quant.scheme))
            assert args.rollout.stop == ["\n"]
            assert args.objective.hyperparameters.get("band_scale") == (64 if args.objective.name in ("tbpo", "gspo", "mis_gspo") else None)
            assert args.objective.hyperparameters.get("is_low") == (0.5 if args.objective.name == "mis_gspo" else None)
            assert args.train.batch_size == (32 if args.objective.name == "onpolicy_grpo" else 8)
            assert args.metrics.dir.startswith(str(out))
    assert seen == {(arm, scheme) for arm in ALL_ARMS for scheme in ("bf16", "w4a16:g64:rollout", "w4a16:g64")}
    assert "grpo_tis goes without --objective.band_scale 64, --objective.is_low 0.5" in printed.err
    assert "onpolicy_grpo makes one optimizer step a rollout: --train.batch_size 32" in printed.err
    assert "mis_gspo goes without" not in printed.err


def test_seeds_come_last_so_that_every_arm_is_seen_early(shared, tmp_path):
    runs = plan(["tbpo", "gspo"], shared, tmp_path, ["bf16", "w4a16"], [3, 5]).runs
    assert [(r.identity.seed, r.identity.scheme, r.identity.objective) for r in runs[:5]] == [
        (3, "bf16", "tbpo"), (3, "bf16", "gspo"), (3, "w4a16", "tbpo"), (3, "w4a16", "gspo"), (5, "bf16", "tbpo"),
    ]  # fmt: skip
    assert len({r.directory for r in runs}) == 8 and runs[0].directory == tmp_path / "tbpo" / "bf16" / "seed3"


def test_a_shared_mis_weight_brings_its_band_to_every_arm(shared, tmp_path):
    words = [*shared, "--objective.is_weight", "mis", "--objective.is_high=1.5"]
    made = plan(["tbpo", "grpo_tis", "openrlhf"], words, tmp_path)
    assert ["--objective.is_high=1.5" in run.flags for run in made.runs] == [True, True, False]
    assert made.notes[-1] == "openrlhf goes without --objective.is_weight mis, --objective.is_high=1.5: it has no such hyperparameter"


@pytest.mark.parametrize(
    "words, own, coefficient, note",
    [
        ([], True, 0, "gets --algo.kl.init_coef 0"),
        (["--algo.kl.init_coef", "0.02"], False, 0.02, None),
        (["--algo.kl.init_coef=0.02", "--algo.kl.estimator", "k3"], False, 0.02, None),
        (["--algo.kl.estimator", "k3"], False, None, "keeps OpenRLHF's KL penalty"),
    ],
)
def test_the_hosts_loss_has_no_kl_penalty_that_the_other_arms_lack(shared, tmp_path, words, own, coefficient, note):
    made = plan(["tbpo", "openrlhf"], [*shared, *words], tmp_path)
    ours, hosts = (train_qarl.resolve(run.flags)[0].algo.kl.init_coef for run in made.runs)
    assert ("--algo.kl.init_coef 0 " in " ".join(made.runs[1].flags) + " ") == own
    assert ours == (coefficient or 0) and hosts == (0.01 if coefficient is None else coefficient)
    assert len(made.notes) == (note is not None) and all(f"openrlhf {note}" in line for line in made.notes)


def test_alone_the_hosts_loss_is_as_the_host_has_it(shared, tmp_path):
    made = plan(["openrlhf"], shared, tmp_path)
    assert train_qarl.resolve(made.runs[0].flags)[0].algo.kl.init_coef == 0.01 and made.notes == []


def test_flags_of_the_hosts_loss_are_its_arms_alone(shared, tmp_path):
    words = ["--actor.eps_clip_low_high", "0.2", "0.28", "--algo.kl.init_coef", "0"]
    made = plan(["tbpo", "openrlhf"], [*shared, *words], tmp_path)
    ours, hosts = (train_qarl.resolve(run.flags)[0].actor.eps_clip_low_high for run in made.runs)
    assert list(hosts) == [0.2, 0.28] and list(ours) != [0.2, 0.28]
    assert made.notes == ["tbpo goes without --actor.eps_clip_low_high 0.2 0.28: of OpenRLHF's own loss"]


def test_a_users_own_objective_is_an_arm(shared, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from qarl_openrlhf.objectives import Surrogate, objective\n\n\n"
        "@objective(level='token', mean='tokens', is_weight='none')\n"
        "def gentle(units, *, steepness: float = 2.0) -> Surrogate:\n    'A surrogate.'\n    return Surrogate(steepness * units.log_ratio * units.advantages)\n"
    )
    arm = f"{tmp_path / 'mine.py'}:gentle"
    run = plan([arm], [*shared, "--objective.steepness", "3"], tmp_path / "out").runs[0]
    assert run.directory == tmp_path / "out" / "gentle" / "w4a16" / "seed0" and run.identity.objective == "gentle"
    assert train_qarl.resolve(run.flags)[0].objective.hyperparameters == {"steepness": 3.0}


@pytest.mark.parametrize(
    "arms, extra, message",
    [
        (["no_such"], [], "--arms no_such: unknown objective"),
        (["tbpo", "tbpo"], [], "arm tbpo is given twice"),
        (["tbpo"], ["--quant.scheme", "bf16"], "--quant.scheme is set for each run"),
        (["tbpo"], ["--metrics.dir=x"], "--metrics.dir is set for each run"),
        ([], [], "no arm is given"),
    ],
)
def test_what_cannot_be_planned_is_named(shared, tmp_path, arms, extra, message):
    with pytest.raises(PlanError, match=message):
        plan(arms, [*shared, *extra], tmp_path)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--schemes", "w3a16"], "w3a16"),
        (["--arms", "tbpo", "--no_such_flag", "1"], "no_such_flag"),
        (["--arms", "tbpo", "--objective.is_cap", "-1"], "is_cap"),
        (["--arms", "tbpo", "--rollout.top_p", "0.9"], "allow_truncated_sampling"),
    ],
)
def test_wrong_flags_end_before_any_run_starts(shared, tmp_path, words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        ablate_objectives.main([*shared, *words, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and not (tmp_path / "out").exists()
    assert message in capsys.readouterr().err


OF_A_RUN = {  # words of the call, and how the answer to them begins
    "scheme that is none": (["--schemes", "w3a16"], "--schemes w3a16: "),
    "scheme and layer": (["--schemes", "w4a16,w4a16:g32", "--actor.model_name_or_path", "NARROW"], "--schemes w4a16: layer model.layers.0.self_attn.q_proj"),
    "scheme and machine": (["--schemes", "bf16,fp8"], "--schemes fp8 needs a GPU engine"),
    "scheme and ranks": (["--schemes", "w8a8", "--vllm.tensor_parallel_size", "2"], "--vllm.tensor_parallel_size 2 with --schemes w8a8: "),
    "arm without its length": (["--arms", "tbpo_short", "--rollout.max_new_tokens", "x"], "argument --rollout.max_new_tokens: "),
    "no number": (["--preset_length", "x"], "argument --preset_length: invalid float value: 'x'"),
    "length below 1": (["--preset_length", "0"], "--preset_length 0: give a number of tokens, 1 or more"),
    "hyperparameter": (["--objective.is_cap", "-1"], "tbpo: is_cap"),
    "flag": (["--rollout.top_p", "0.9"], "--rollout.top_p 0.9 samples from a truncated distribution"),
    "number": (["--actor.adam.lr", "-3e-6"], "--actor.adam.lr -3e-06 is out of range"),
    "OpenRLHF's": (["--train.partial_rollout_enable"], "OpenRLHF refuses these flags: "),
    "unknown": (["--no_such_flag", "1"], "unrecognized arguments: --no_such_flag 1"),
}


@pytest.mark.parametrize("case", OF_A_RUN)
@pytest.mark.parametrize("dry", [["--dry_run"], []])
def test_an_error_of_a_run_is_told_by_the_command_and_the_flags_that_were_given(shared, tmp_path, case, dry, capsys):
    words, begin = OF_A_RUN[case]
    narrow = save_tiny_model(tmp_path / "narrow", "llama", hidden=96)
    words = [word.replace("NARROW", narrow) for word in words]
    capsys.readouterr()  # the bar of the model's writing
    with pytest.raises(SystemExit) as stopped:
        ablate_objectives.main([*dry, *shared, "--arms", "tbpo", *words, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "train_qarl:" not in said and "--quant.scheme" not in said
    assert said.startswith("usage: ablate_objectives --arms") and f"ablate_objectives: error: {begin}" in said, said


def test_an_arm_is_told_as_it_was_given():
    run = PlannedRun(Identity("tbpo_short", "w4a16", 0), None, [])
    for text, told in (
        ("--preset: no length (--preset_length or --data.max_len)", "--arms tbpo_short: no length (--preset_length or --data.max_len)"),
        ("--objective.name tbpo replaces it", "--arms tbpo_short replaces it"),
        ("--objective.band_scale 1: use --preset_length", "--objective.band_scale 1: use --preset_length"),
    ):
        assert ablate_objectives._told(run, text) == told


@pytest.mark.parametrize(
    "schemes",
    [["bf16", "BF16"], ["w4a16", "w4a16:g128"], ["w8a8", "w4a16:g64:rollout", "W4A16:g64:rollout"]],
)
def test_one_scheme_written_twice_is_refused(shared, tmp_path, schemes):
    with pytest.raises(PlanError, match=f"scheme {schemes[-1]} is given twice, first as {schemes[-2]}"):
        plan(["tbpo"], shared, tmp_path, schemes)


@pytest.mark.parametrize(
    "words, message",
    [
        *[([flag, value], f"argument {flag}: is empty") for flag in ("--arms", "--schemes", "--seeds") for value in ("", ",", " , ")],
        (["--seeds", "a"], "argument --seeds: 'a': give whole numbers"),
        (["--seeds", "0,1.5"], "argument --seeds: '0,1.5': give whole numbers"),
        (["--parallel", "0"], "--parallel 0: give 1 or more"),
        (["--parallel", "-1"], "--parallel -1: give 1 or more"),
        (["--out", "FILE"], "is not a directory: name a directory"),
        (["--out", "FILE/below"], "is not a directory: name a directory"),
        (["--out", "/proc/x"], "nothing can be written to /proc"),
        (["--arms", "FILE.py:f"], "--arms: "),
    ],
)
@pytest.mark.parametrize("dry", [["--dry_run"], []])
def test_what_cannot_be_begun_is_said_first(shared, tmp_path, words, message, dry, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "file.py").write_text("def f(:")
    words = [word.replace("FILE", str(tmp_path / "file")) for word in words]
    with pytest.raises(SystemExit) as stopped:
        ablate_objectives.main([*dry, "--arms", "tbpo", "--out", str(tmp_path / "out"), *words, *shared])
    assert message in str(stopped.value) + capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"state": "finished"}', '{"state": "running", "flags": null}'])
def test_a_broken_status_is_named(shared, tmp_path, text):
    run = plan(["tbpo"], shared, tmp_path).runs[0]
    run.directory.mkdir(parents=True)
    (run.directory / "status.json").write_text(text)
    with pytest.raises(PlanError, match="status.json is broken: remove .*seed0"):
        is_finished(run)


def test_hyperparameters_of_several_own_objectives(shared, tmp_path, capsys):
    arms = []
    for name in ("steepness", "width"):
        (tmp_path / f"{name}.py").write_text(
            "from qarl_openrlhf.objectives import Surrogate, objective\n\n\n"
            "@objective(level='token', mean='tokens', is_weight='none')\n"
            f"def of_{name}(units, *, {name}: float = 2.0) -> Surrogate:\n    'A surrogate.'\n    return Surrogate({name} * units.ratio)\n"
        )
        arms.append(f"{tmp_path / name}.py:of_{name}")
    words = ["--arms", ",".join(arms), "--schemes", "bf16", "--objective.width", "3", "--objective.steepness", "4"]
    ablate_objectives.main([*words, *shared, "--out", str(tmp_path / "out"), "--dry_run"])
    commands = capsys.readouterr().out.splitlines()
    assert ["--objective.steepness 4" in c for c in commands] == [True, False]
    assert ["--objective.width 3" in c for c in commands] == [False, True]


def test_parallel_runs_need_a_cluster(shared, tmp_path):
    with pytest.raises(SystemExit, match="--parallel needs --ray_address"):
        ablate_objectives.main([*shared, "--parallel", "2", "--out", str(tmp_path)])


def test_flags_are_split_with_their_values():
    assert split_flags(["--a.b", "1", "-2", "--c=3", "--no-d", "--e"]) == [
        ("a.b", ["--a.b", "1", "-2"]), ("c", ["--c=3"]), ("d", ["--no-d"]), ("e", ["--e"]),
    ]  # fmt: skip
    with pytest.raises(PlanError, match="'x' belongs to no flag"):
        split_flags(["x"])
