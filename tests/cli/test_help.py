"""--help: our flags first, then OpenRLHF's by subject, each once, with its default; and the parser parses as before."""

import re

import pytest

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.cli.flags import OURS, add_flags
from qarl_openrlhf.cli.help_text import THEIRS, arrange
from qarl_openrlhf.cli.host import HostCommandLine


@pytest.fixture(scope="module")
def parser():
    host = HostCommandLine()
    add_flags(host.parser)
    return host.parser


@pytest.fixture(scope="module")
def text(parser, request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        before = {action.dest: action.default for action in parser._actions}
        arrange(parser)
        assert {action.dest: action.default for action in parser._actions} == before
        return parser.format_help()


def test_every_flag_once_ours_first(parser, text):
    titles = [line.rstrip(":") for line in text.splitlines() if re.match(r"\S.*:$", line)]
    ours = [title for title in titles if title.startswith(OURS)]
    theirs = [title for title in titles if title.startswith("OpenRLHF")]
    assert titles == ["options", *ours, *theirs] and len(ours) == 5 and len(theirs) == len(THEIRS)
    flags = [action.option_strings[-1 if action.dest == 'help' else 0] for action in parser._actions]
    shown = re.findall(r"^  (?:-h, )?(--[\w.]+)", text, re.MULTILINE)
    assert sorted(shown) == sorted(flags)
    assert shown.index("--quant.scheme") < shown.index("--dry_run") < shown.index("--sync.verify") < shown.index("--actor.adam.lr")


def section(text: str, flag: str) -> str:
    """The help of one flag, its lines joined."""
    found = re.search(rf"^  {re.escape(flag)}[ \n].*?(?=^  -|^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(found.group().split())


@pytest.mark.parametrize(
    "flag, end",
    [
        ("--quant.scheme", "(default: bf16)"),
        ("--sync.probe_tol", "(default: 0.3)"),
        ("--actor.adam.betas", "--actor.adam.betas X X (default: 0.9 0.95)"),
        ("--actor.aux_loss_coef", "(default: 0)"),
        ("--eval.steps", "--eval.steps N (default: -1)"),
        ("--actor.muon.nesterov", "(default: on)"),
        ("--actor.muon.no_nesterov", "--actor.muon.no_nesterov"),
        ("--train.colocate_all", "they will share same gpus."),  # a switch that is off has no default to tell
        ("--objective.is_cap", "default 2.0"),
        ("--metrics.dir", "(default: --ckpt.output_dir)"),
        ("--rollout.max_new_tokens", "N Max tokens to generate per sample. If None, dynamically computed as max_len - prompt_len per sample."),
    ],
)
def test_defaults_are_told_once(text, flag, end):
    told = section(text, flag)
    assert told.endswith(end) or end in told and "(default" not in told, told
    assert told.count("default") <= 1 + ("; default" in told and "(" in told)


def test_help_of_the_program_says_what_must_be_given(capsys):
    with pytest.raises(SystemExit) as stopped:
        train_qarl.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for flag in ("--actor.model_name_or_path", "--data.prompt_dataset", "--reward.remote_url", "--vllm.num_engines"):
        assert flag in text.split("\n\n")[0]


def test_help_shows_a_user_s_own_hyperparameters(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from qarl_openrlhf.objectives import Surrogate, objective\n\n\n"
        "@objective(level='token', mean='tokens', is_weight='none')\n"
        "def mine(units, *, steepness: float = 2.5) -> Surrogate:\n    'A surrogate.'\n    return Surrogate(steepness * units.advantages)\n"
    )
    with pytest.raises(SystemExit):
        train_qarl.main(["--objective.name", f"{path}:mine", "--help"])
    assert "default 2.5" in section(capsys.readouterr().out, "--objective.steepness")
