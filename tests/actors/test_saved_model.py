"""The saved model has the tensors of the base model, tied ones once, and loads in transformers and vLLM."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

VLLM = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, gpu_memory_utilization=0.1)
out = llm.generate({"prompt_token_ids": list(range(5, 25))}, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False))
print("LOGPROBS", *(row[t].logprob for t, row in zip(range(6, 25), out[0].prompt_logprobs[1:])))
"""


def saved(trainer, directory) -> dict[str, torch.Tensor]:
    trainer.strategy.save_model(trainer.actor, trainer.tokenizer_of_the_model, str(directory))
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.fixture
def learner(make_learner):
    def make(**options):
        from transformers import AutoTokenizer

        trainer = make_learner(**options)
        trainer.tokenizer_of_the_model = AutoTokenizer.from_pretrained(trainer.args.actor.model_name_or_path)
        with torch.no_grad():
            for parameter in trainer.actor.network.parameters():  # trained: not what was loaded
                parameter.data.mul_(1.5)
        return trainer

    return make


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("zero", [2, 3])
def test_tied_weights_are_saved_once_and_loaded_as_one(learner, tmp_path, tied, zero):
    trainer = learner(family="qwen3", tied=tied, ds__zero_stage=zero)
    base = AutoModelForCausalLM.from_pretrained(trainer.args.actor.model_name_or_path, dtype=torch.bfloat16)
    written = saved(trainer, tmp_path)
    assert written.keys() == {name for name, _ in base.named_parameters()}
    assert ("lm_head.weight" in written) is not tied
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    mine = dict(trainer.actor.network.named_parameters())
    assert all(torch.equal(parameter, mine[name]) for name, parameter in model.named_parameters())
    assert "save_pretrained" not in vars(trainer.actor.network)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_every_file_has_the_mode_that_umask_gives(learner, tmp_path, umask):
    trainer = learner(family="qwen3", ds__zero_stage=2)
    before = os.umask(umask)
    try:
        saved(trainer, tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {oct(0o666 & ~umask)}, modes


@pytest.mark.slow
def test_vllm_loads_a_tied_model(learner, tmp_path):
    trainer = learner(family="qwen3", tied=True, ds__zero_stage=2)
    saved(trainer, tmp_path)
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", VLLM, str(tmp_path)], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    engine = torch.tensor([float(word) for word in line.split()[1:]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.arange(5, 25)[None]).logits[0, :-1].float()
    expected = torch.log_softmax(logits, -1).gather(-1, torch.arange(6, 25)[:, None])[:, 0]
    assert (engine - expected).abs().mean() < 0.05
