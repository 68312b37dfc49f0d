"""The small model made from nothing: problems apart, solutions that the reward accepts, a directory that the stack loads."""

import json
from contextlib import contextmanager
from functools import partial
from random import Random

import pytest
import torch

from qarl_openrlhf.data import small_qwen3
from qarl_openrlhf.data.byte_tokenizer import END, VOCABULARY, byte_tokenizer
from qarl_openrlhf.data.pretrain import collate, solved, train
from qarl_openrlhf.data.reasoning_gym import DataError, prompt_rows
from qarl_openrlhf.data.small_qwen3 import Settings, build_model, make
from qarl_openrlhf.data.worked_sums import distinct, response, supervised
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.rewards.reasoning_gym import score

SUMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
TINY = dict(config=SUMS, layers=1, intermediate=256, prompts=24, heldout=8, steps=6, batch_size=8, check_every=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("small") / "model"
    return out, make(out, Settings(**TINY), show=lambda line: None)


def test_steps_are_written_out():
    entry = {"answer": "-10", "metadata": {"expression": "12 + 34 - 56"}}
    assert response(entry, "steps") == "\n12+34=46\n46-56=-10\n<answer>-10</answer>"
    assert response(entry, "equation") == response(entry, "question") == "<answer>-10</answer>"
    entry = {"answer": "8", "metadata": {"expression": "-3 - -5 + 6"}}
    assert response(entry, "steps") == "\n-3--5=2\n2+6=8\n<answer>8</answer>"
    for expression in ("3", "3 * 4", "1.5 + 2", "(3 + 4) - 5"):
        with pytest.raises(DataError, match="style 'steps' writes out sums.*equation"):
            response({"answer": "7", "metadata": {"expression": expression}}, "steps")


def test_slips_go_on_into_what_follows():
    entry = {"answer": "21", "metadata": {"expression": "1 + 2 + 3 + 4 + 5 + 6"}}
    wrong, random = 0, Random(0)
    for _ in range(400):
        *lines, answer = response(entry, "steps", slips=0.3, random=random).strip().split("\n")
        left, right = zip(*(line.split("=") for line in lines))
        off = [int(r) - eval(l) for l, r in zip(left, right)]
        assert set(off) <= {-10, -1, 0, 1, 10} and answer == f"<answer>{right[-1]}</answer>"
        assert all(later.startswith(earlier) for later, earlier in zip(left[1:], right))
        wrong += sum(map(bool, off))
    assert 0.27 < wrong / 2000 < 0.33
    assert response(entry, "steps", slips=0.0) == response(entry, "steps")


@pytest.mark.parametrize("style", ["steps", "equation", "question"])
def test_every_solution_earns_the_reward(style):
    config = {"min_terms": 2, "max_terms": 12, "min_digits": 1, "max_digits": 4, "allow_negation": True}
    for row in prompt_rows("chain_sum", 100, config=config, style="question" if style == "question" else "equation"):
        entry = json.loads(row["label"])
        text = response(entry, style)
        assert score(row["input"] + text + END, row["input"], row["label"])[0] == 1.0
        wrong = text.replace(f"<answer>{entry['answer']}", f"<answer>{int(entry['answer']) + 1}")
        assert score(row["input"] + wrong + END, row["input"], row["label"])[0] == 0.0
        if style == "steps":  # each line is right, and begins where the one before ended
            lines = [line.split("=") for line in text.strip().split("\n")[:-1]]
            assert all(eval(left) == int(right) for left, right in lines)
            assert all(later[0].startswith(earlier[1]) for earlier, later in zip(lines, lines[1:]))


def test_tokenizer_reads_and_writes_any_text(made, tmp_path):
    from transformers import AutoTokenizer

    for tokenizer in (byte_tokenizer(), AutoTokenizer.from_pretrained(made[0] / "model")):
        assert len(tokenizer) == VOCABULARY and tokenizer.eos_token == END
        for text in ("3 + 6 =", "\n3+6=9\n<answer>9</answer>", "  two\t", "ünïcödé → 数", f"<answer>1</answer>{END}"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert len(tokenizer("<answer>12</answer>")["input_ids"]) == 4
        assert tokenizer.decode(range(VOCABULARY))  # whatever is sampled has a text


def test_no_problem_is_in_two_sets(made):
    out, record = made
    sets = {name: [json.loads(line) for line in open(out / f"{name}.jsonl")] for name in ("prompts", "heldout")}
    prompts, heldout = ({row["input"] for row in rows} for rows in sets.values())
    assert (len(prompts), len(heldout)) == (24, 8) and not prompts & heldout
    apart = {f"State the final answer to the following arithmetic problem: {text}" for text in prompts | heldout}
    stream = supervised("chain_sum", SUMS, "steps", 0, None, but=apart)
    seen = {next(stream)[0] for _ in range(4000)}
    assert len(seen) > 2000 and not seen & (prompts | heldout)
    longest = max(len(response(json.loads(row["label"]), "steps")) for rows in sets.values() for row in rows)
    assert record["response_tokens"]["max"] == longest - len("<answer></answer>") + 2 + 1


def test_the_directory_is_what_the_stack_loads(made):
    from transformers import AutoModelForCausalLM

    out, record = made
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype="auto")
    assert model.dtype == torch.bfloat16 and model.config.model_type == "qwen3" and not model.config.tie_word_embeddings
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    for module in model.model.layers.modules():  # every scheme can hold every layer
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 128 == 0 and module.out_features % 128 == 0
    assert QuantScheme.parse("w4a16").group_size == 128
    assert json.loads((out / "training.json").read_text()) == record
    assert [point["step"] for point in record["curve"]] == [3, 6] and record["curve"][1]["loss"] < record["curve"][0]["loss"]


def test_the_same_settings_make_the_same_files(made, tmp_path):
    out, record = made
    assert make(tmp_path / "again", Settings(**TINY), show=lambda line: None) == record
    for name in ("model/model.safetensors", "prompts.jsonl", "heldout.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    assert make(out, Settings(**TINY)) is None  # already there
    with pytest.raises(DataError, match="does not hold this model"):
        make(out, Settings(**TINY | {"seed": 1}))


def test_a_model_that_there_is_can_be_taught(made, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    base = made[0] / "model"
    settings = Settings(**TINY | {"base": str(base), "layers": 3, "seed": 1})
    record = make(tmp_path / "taught", settings, show=lambda line: None)
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "taught" / "model"))
    assert before.keys() == after.keys() and all(before[name].shape == after[name].shape for name in before)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > len(before) / 2 and all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert AutoTokenizer.from_pretrained(tmp_path / "taught" / "model").eos_token == END
    assert record["settings"]["base"] == str(base) and record["parameters"] == made[1]["parameters"]
    assert make(tmp_path / "taught", settings) is None
    with pytest.raises(DataError, match=f"--base {tmp_path}: no causal language model"):
        make(tmp_path / "none", Settings(**TINY | {"base": str(tmp_path)}), show=lambda line: None)
    assert not (tmp_path / "none").exists()


def test_a_policy_can_learn_through_its_low_bit_weights(made, tmp_path):
    """Straight-through: from the same weights another path, and the loss of the quantized model falls."""
    from safetensors.torch import load_file

    record = make(tmp_path / "quantized", Settings(**TINY | {"scheme": "w4a16:g32"}), show=lambda line: None)
    losses = [point["loss"] for point in record["curve"]]
    assert losses[1] < losses[0] and losses != [point["loss"] for point in made[1]["curve"]]
    weights, plain = (load_file(path / "model" / "model.safetensors") for path in (tmp_path / "quantized", made[0]))
    assert weights.keys() == plain.keys() and {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert 0 < record["apart"] < 1 and record["solved"].keys() > made[1]["solved"].keys()
    assert record["settings"]["scheme"] == "w4a16:g32" and "scheme" not in made[1]["settings"]


def test_a_policy_can_learn_in_bf16_and_through_low_bit_weights_in_turn(made, tmp_path):
    record = make(tmp_path / "both", Settings(**TINY | {"scheme": "w4a16:g32", "both": 2}), show=lambda line: None)
    losses = [point["loss"] for point in record["curve"]]
    assert losses[1] < losses[0] and losses != [point["loss"] for point in made[1]["curve"]]
    assert 0 < record["apart"] < 1 and record["settings"]["both"] == 2 and "both" not in made[1]["settings"]
    with pytest.raises(DataError, match="--both: --scheme bf16 is BF16 itself"):
        Settings(**TINY | {"both": 1})


def test_steps_take_turns_among_the_forms():
    tokenizer, seen = byte_tokenizer(), []
    model = build_model(Settings(**TINY), tokenizer)

    @contextmanager
    def form(name):
        seen.append(name)
        yield

    pairs = supervised("chain_sum", SUMS, "steps", 0, None, but=set())
    forms = [partial(form, "one"), partial(form, "other")]
    train(model, tokenizer, pairs, steps=4, batch_size=2, lr=1e-3, check=lambda: 0.0, check_every=4, stop_at=None,
          show=lambda line: None, forms=forms)
    assert seen == ["other", "one"] * 2


def test_training_learns_and_stops_at_a_share():
    tokenizer = byte_tokenizer()
    model = build_model(Settings(**TINY), tokenizer)
    pair = ("1 + 1 =", "<answer>2</answer>")
    row = {"input": pair[0], "label": json.dumps({"task": "chain_sum", "answer": "2", "metadata": {}})}
    shares = []

    def check():
        shares.append(solved(model, tokenizer, [row] * 16, max_new_tokens=6, temperature=1.0))
        return shares[-1]

    options = dict(steps=200, batch_size=2, lr=3e-3, check=check, check_every=10, stop_at=0.9, show=lambda line: None)
    before = torch.random.get_rng_state()
    curve = train(model, tokenizer, iter([pair] * 400), **options)
    assert torch.equal(torch.random.get_rng_state(), before)  # sampling leaves training's randomness alone
    assert shares[0] < 0.9 <= shares[-1] and curve[-1]["step"] < 200 and len(curve) == len(shares)
    assert solved(model, tokenizer, [row], max_new_tokens=6, temperature=0.0) == 1.0


def test_only_the_response_is_learnt():
    tokenizer = byte_tokenizer()
    ids, labels = collate([("1 + 1 =", "<answer>2</answer>"), ("10 + 10 =", "<answer>20</answer>")], tokenizer)
    assert ids.shape == labels.shape == (2, 9 + 5)
    assert tokenizer.decode(ids[0][:-3]) == f"1 + 1 =<answer>2</answer>{END}" and (ids[0, -3:] == tokenizer.pad_token_id).all()
    assert tokenizer.decode(labels[0][labels[0] >= 0]) == f"<answer>2</answer>{END}"
    assert (labels[0, -3:] == -100).all() and (labels[:, :7] == -100).all()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--hidden", "320"], "--hidden 320: give a multiple of 256"),
        (["--stop_at", "1.5"], "--stop_at 1.5"),
        (["--slips", "1"], "--slips 1.0: give a share"),
        (["--slips", "0.1", "--style", "equation"], "--slips 0.1: .*--style steps"),
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--scheme", "w3a16"], "--scheme w3a16: "),
        (["--scheme", "w4a16:g64:rollout"], "--scheme w4a16:g64:rollout: .*write w4a16:g64$"),
        (["--scheme", "w4a16", "--both", "-1"], "--both -1: give a number of steps"),
        (["--task", "sums"], "no task 'sums'"),
        (["--task", "spell_backward", "--config"], "needs an expression"),
        (["--config", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"], "only about (200|19.) different problems"),
    ],
)
def test_wrong_arguments_are_one_line_and_leave_nothing(tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        small_qwen3.main([str(tmp_path / "out"), *words])
    assert not any(tmp_path.iterdir())


def test_distinct_entries_differ():
    entries = iter([{"question": q} for q in "aabcdd"])
    assert [e["question"] for e in distinct(entries, 3, but={"b"})] == ["a", "c", "d"]
