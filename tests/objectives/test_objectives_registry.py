"""Names, hyperparameters, presets, a user's own objective, and what the package may import."""

import ast
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import qarl_openrlhf.objectives as objectives
from qarl_openrlhf.objectives import (
    PRESETS,
    ObjectiveError,
    build_objective,
    find_spec,
    list_objectives,
    objective_hyperparameters,
    preset_flags,
    short_response_band_scale,
)

ROOT = Path(__file__).parents[2]


def test_the_names_and_defaults_of_the_contract():
    assert set(list_objectives()) == {
        *("grpo_tis", "positive_grpo", "onpolicy_grpo", "dual_clip", "dapo", "cispo"),
        *("sapo", "gspo", "mis_gspo", "mis_grpo", "tbpo"),
    }
    assert build_objective("mis").name == "mis_gspo"
    hp = build_objective("tbpo").hyperparameters
    expected = {"seq_clip_ratio_high": 4e-4, "neg_seq_clip_ratio_high": 7e-4, "neg_seq_clip_ratio_low": 3e-4}
    expected |= {"band_scale": 1.0, "is_weight": "seq", "is_cap": 2.0, "drop": False}
    assert {key: hp[key] for key in expected} == expected
    defaults = {name: objective_hyperparameters(name)["is_weight"][0] for name in list_objectives()}
    assert {n for n, w in defaults.items() if w == "seq"} == {"tbpo", "gspo"}
    assert {n for n, w in defaults.items() if w == "mis"} == {"mis_gspo", "mis_grpo"}
    assert {n for n in list_objectives() if find_spec(n).on_policy} == {"onpolicy_grpo"}
    assert {n for n in list_objectives() if find_spec(n).mean == "responses"} == {"sapo", "gspo", "mis_gspo", "tbpo"}


@pytest.mark.parametrize("name", list_objectives())
def test_every_listed_hyperparameter_is_accepted_with_its_default_and_documented(name):
    listed = objective_hyperparameters(name)
    for key, (default, kind, help) in listed.items():
        assert type(default) is kind and help, key
    assert build_objective(name, **{key: default for key, (default, _, _) in listed.items()}).name == name
    documentation = find_spec(name).function.__doc__ + sys.modules[find_spec(name).function.__module__].__doc__
    for key in find_spec(name).own_hyperparameters:
        assert key in documentation, f"{key} is not in the docstring"
    assert re.search(r"\d{4}\.\d{4,5}|et al", documentation), "no source named"


def test_unknown_names_list_what_exists():
    existing = "unknown objective 'tbp'; there are: tbpo, grpo_tis, .*mis for mis_gspo.*path/to/file.py:function"
    with pytest.raises(ObjectiveError, match=existing):
        build_objective("tbp")
    existing = "grpo_tis has no hyperparameter 'band_scale'; it has: clip_ratio_low, clip_ratio_high, is_weight"
    with pytest.raises(ObjectiveError, match=existing):
        build_objective("grpo_tis", band_scale=2.0)


@pytest.mark.parametrize(
    ("name", "hp", "message"),
    [
        ("tbpo", {"is_weight": "tis"}, "one of none, token, seq, mis"),
        ("tbpo", {"is_cap": 0.9}, "is_cap=0.9 must be at least 1"),
        ("tbpo", {"is_cap": math.nan}, "must be finite"),
        ("tbpo", {"is_cap": "2"}, "must be a float"),
        ("tbpo", {"is_cap": True}, "must be a float"),
        ("tbpo", {"drop": 1}, "must be a bool"),
        ("tbpo", {"band_scale": 0.0}, "must be above 0"),
        ("tbpo", {"neg_seq_clip_ratio_low": 1.0}, "must be at least 0 and below 1"),
        ("tbpo", {"neg_seq_clip_ratio_high": -1e-4}, "must be at least 0"),
        ("tbpo", {"band_scale": 4000.0}, "choose a band_scale below 3333"),
        ("gspo", {"seq_clip_ratio_low": 0.5, "band_scale": 2.0}, "choose a band_scale below 2"),
        ("tbpo", {"is_low": 0.5}, "is_low is of is_weight='mis', not of 'seq'"),
        ("mis", {"is_low": 2.0}, "is_low=2 must be below is_high=2"),
        ("mis", {"is_statistic": "mean"}, "one of geometric, product, worst_token"),
        ("dual_clip", {"clip_ratio_c": 1.0}, "must be above 1"),
        ("dual_clip", {"clip_ratio_c": 1.1}, "at least 1 \\+ clip_ratio_high = 1.2"),
        ("grpo_tis", {"clip_ratio_low": 1.0}, "must be at least 0 and below 1"),
        ("sapo", {"tau_neg": 0.0}, "must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(name, hp, message):
    with pytest.raises(ObjectiveError, match=message):
        build_objective(name, **hp)


def test_an_int_is_a_float():
    assert build_objective("tbpo", band_scale=4).hyperparameters["band_scale"] == 4.0


# ---- presets -------------------------------------------------------------------------------------------------------


def test_every_preset_builds():
    assert set(list_objectives()) <= set(PRESETS)
    for name in PRESETS:
        flags = preset_flags(name, mean_response_length=1024)
        assert all(flag.startswith("objective.") for flag in flags)
        hp = {flag.removeprefix("objective."): value for flag, value in flags.items()}
        build_objective(hp.pop("name"), **hp)


def test_short_responses_get_wider_bands():
    assert preset_flags("tbpo_short", mean_response_length=64)["objective.band_scale"] == 16.0
    assert short_response_band_scale(16384) == 1.0
    with pytest.raises(ObjectiveError, match="mean length in tokens"):
        preset_flags("tbpo_short")
    with pytest.raises(ObjectiveError, match="above 0 tokens"):
        preset_flags("tbpo_short", mean_response_length=0)
    with pytest.raises(ObjectiveError, match="unknown preset 'tpbo'; there are: tbpo"):
        preset_flags("tpbo")
    assert "sqrt" in str(PRESETS["tbpo_short"]["objective.band_scale"]), "the stored preset must not be filled in"


# ---- a user's own --------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_works(tmp_path, batch):
    document = (ROOT / "docs/objectives.md").read_text()
    example = re.search(r"```python\n(from typing.*?)```", document, re.DOTALL).group(1)
    file = tmp_path / "mine.py"
    file.write_text(example)
    name = f"{file}:reinforce_band"
    default, kind, help = objective_hyperparameters(name)["width"]
    assert default == 0.1 and kind is float and "at least 0" in help
    log_probs, old, rollout, advantages, mask = batch
    leaf = log_probs.clone().requires_grad_()
    build_objective(name, width=0.5, is_weight="seq")(leaf, old, rollout, advantages, mask).loss.backward()
    assert leaf.grad.abs().sum() > 0
    with pytest.raises(ObjectiveError, match="width=-1.0 must be at least 0"):
        build_objective(name, width=-1.0)
    with pytest.raises(ObjectiveError, match="has no hyperparameter 'breadth'; it has: width, is_weight"):
        build_objective(name, breadth=1.0)


OWN = """
from qarl_openrlhf.objectives import Surrogate, objective
def plain(units): ...
@objective(level="token", mean="tokens", is_weight="none")
def declared(units): return Surrogate(units.ratio * units.advantages)
@objective(level="token", mean="tokens", is_weight="none")
def no_default(units, *, width: float): ...
@objective(level="token", mean="tokens", is_weight="none")
def not_a_surrogate(units): return units.ratio
@objective(level="token", mean="tokens", is_weight="none")
def summed(units): return Surrogate((units.ratio * units.advantages).sum())
"""


def test_a_bad_file_or_function_says_what_to_do(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert build_objective(f"{file}:declared").name == "declared"
    for name, message in [
        (f"{tmp_path}/nowhere.py:f", "there is no file"),
        (str(file), "say which function"),
        (f"{file}:plain", "plain is not declared as an objective; put @objective.*declared there: declared"),
        (f"{file}:absent", "absent is not in that file"),
        (f"{file}:no_default", "hyperparameter 'width' needs a default"),
        (f"{file}:not_a_surrogate", "must return a Surrogate"),
        (f"{file}:summed", r"values are \[\] but its units are \[3, 1\]"),
    ]:
        with pytest.raises(ObjectiveError, match=message):
            build_objective(name)
    for declaration in ({"level": "word"}, {"level": "response", "mean": "tokens"}):
        with pytest.raises(ObjectiveError, match="level"):
            objectives.objective(**{"level": "token", "mean": "responses", "is_weight": "none"} | declaration)


def test_the_package_imports_torch_and_nothing_else():
    for file in Path(objectives.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = {node.module.split(".")[0]}
            else:
                continue
            assert roots <= {"torch", *sys.stdlib_module_names}, (file.name, roots)


def test_surrogates_are_plain_functions_of_their_units():
    """Usable without the machinery around them."""
    x = torch.tensor([0.0, 1e-2])
    units = objectives.Units(x, torch.tensor([1.0, -1.0]), x)
    surrogate = find_spec("tbpo").function(units, neg_seq_clip_ratio_high=1e-3)
    torch.testing.assert_close(surrogate.values, torch.tensor([1.0, -1.001]))
