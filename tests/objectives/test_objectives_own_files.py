"""A user's objective file that does not work is refused with a message, whatever it does wrong."""

import pytest

from qarl_openrlhf.cli.flags import add_flags
from qarl_openrlhf.cli.host import HostCommandLine
from qarl_openrlhf.objectives import ObjectiveError, build_objective

HEAD = "from typing import Annotated\nfrom qarl_openrlhf.objectives import Param, Surrogate, objective\n"
DECLARED = "@objective(level='token', mean='tokens', is_weight='token')\n"
GOOD = "    return Surrogate(units.ratio * units.advantages)\n"


def write(directory, body: str) -> str:
    path = directory / "mine.py"
    path.write_text(body)
    return f"{path}:f"


@pytest.mark.parametrize(
    "text, message",
    [
        ("def f(:\n", "line 1 cannot be imported: SyntaxError"),
        ("raise RuntimeError('boom')\n", "RuntimeError: boom"),
        ("import sys; sys.exit(7)\n", "SystemExit: 7"),
        ("import no_such_module_of_mine\n", "ModuleNotFoundError"),
        (HEAD + "@objective(level='token')\ndef f(units):\n" + GOOD, "TypeError"),
        (HEAD + "@objective(level='word', mean='tokens', is_weight='token')\ndef f(units):\n" + GOOD, "level is one of"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path, text, message):
    with pytest.raises(ObjectiveError, match=message):
        build_objective(write(tmp_path, text))


@pytest.mark.parametrize(
    "signature, body, message",
    [
        ("units", "    raise ValueError('I do not like it')\n", "ValueError: I do not like it"),
        ("units", "    return Surrogate(units.ratio * float('nan'))\n", "its loss is nan"),
        ("units", "    return Surrogate(units.ratio.detach() * units.advantages)\n", "carry no gradient"),
        ("units", "    return Surrogate((units.ratio > 0).long())\n", "as floats"),
        ("units", "    r = units.ratio\n    r2 = r * r\n    r.zero_()\n    return Surrogate(r2)\n", "inplace"),
        ("units", "    return Surrogate((units.log_ratio * units.advantages).sqrt())\n", "its gradient is"),
        ("units", "    return None\n", "must return a Surrogate"),
        ("", "    return None\n", "TypeError"),
        ("units, width=3.0", GOOD, "keyword-only"),
        ("units, *, a: 'nosuchtype' = 1.0", GOOD, "type hints"),
        ("units, *, a=1.0", GOOD, "needs a default and a type"),
        ("units, *, is_cap: float = 0.1", GOOD, "'is_cap' is a flag that every objective has"),
        ("units, *, name: str = 'x'", GOOD, "'name' is a flag"),
        ("units, *, hyperparameters: float = 1.0", GOOD, "'hyperparameters' is a flag"),
    ],
)
def test_surrogates_that_cannot_train(tmp_path, signature, body, message):
    with pytest.raises(ObjectiveError, match=message):
        build_objective(write(tmp_path, f"{HEAD}{DECLARED}def f({signature}):\n{body}"))


def test_a_hyperparameter_of_another_type_than_an_existing_flag(tmp_path):
    own = write(tmp_path, f"{HEAD}{DECLARED}def f(units, *, band_scale: str = 'x'):\n{GOOD}")
    with pytest.raises(ObjectiveError, match="'band_scale' is a float in tbpo"):
        add_flags(HostCommandLine().parser, own_objective=own)


@pytest.mark.parametrize("name, given", [("tbpo", {"band_scale": 1e300}), ("tbpo", {"is_cap": 1e300}), ("sapo", {"tau_pos": 1e300})])
def test_values_that_overflow_never_give_another_error(name, given):
    try:
        build_objective(name, **given)
    except ObjectiveError as error:
        assert next(iter(given)) in str(error)


def test_one_that_works_is_taken(tmp_path):
    own = write(tmp_path, f"{HEAD}{DECLARED}def f(units, *, a: Annotated[float, Param('100 %', above=0)] = 2.0):\n{GOOD}")
    assert build_objective(own, a=3.0).hyperparameters["a"] == 3.0
