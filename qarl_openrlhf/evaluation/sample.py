"""Sample k responses to each item of a task with a vLLM engine, judge them, and keep every one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qarl_openrlhf.evaluation.grade import CodeGrader, MathGrader
from qarl_openrlhf.evaluation.items import Item, Settings
from qarl_openrlhf.evaluation.records import Records
from qarl_openrlhf.evaluation.scores import task_scores

RESPONSES_AT_ONCE = 2048  # what is lost when a run is stopped, and what an engine has to batch


class Runner:
    """llm: `vllm.LLM`; out: directory for records; grader: of the items' kind."""

    def __init__(self, llm, settings: Settings, out: Path, grader: MathGrader | CodeGrader, *, at_once: int = RESPONSES_AT_ONCE):
        self.llm, self.settings, self.out, self.grader, self.at_once = llm, settings, Path(out), grader, at_once

    def run(self, items: list[Item], k: int, progress: Callable[[str], None] = print) -> dict:
        """The task's scores; only items without k samples are sampled."""
        task = items[0].task
        records = Records(self.out, task)
        done = records.done(items, k)
        left = [item for item in items if item.index not in done]
        if done:
            progress(f"{task}: {len(done)} of {len(items)} items are done already")
        step = max(1, self.at_once // k)
        for start in range(0, len(left), step):
            made = self._sample(left[start : start + step], k)
            records.append(made)
            done |= {record["index"]: record for record in made}
            right = sum(sample["right"] for record in done.values() for sample in record["samples"][:k])
            progress(f"{task}: {len(done)}/{len(items)} items, avg@{k} so far {right / (k * len(done)):.3f}")
        return task_scores([done[item.index] for item in items], k, headline=self.grader.headline)

    def _sample(self, items: list[Item], k: int) -> list[dict]:
        from vllm import SamplingParams

        s = self.settings
        prompts = [{"prompt_token_ids": self.token_ids(item)} for item in items]
        params = [
            SamplingParams(n=k, temperature=s.temperature, top_p=s.top_p, max_tokens=s.max_tokens, seed=item.seed(s.seed))
            for item in items
        ]
        outputs = [output.outputs for output in self.llm.generate(prompts, params, use_tqdm=False)]
        answers = [self.grader.answer(sample.text) for samples in outputs for sample in samples]
        owners = [item for item, samples in zip(items, outputs, strict=True) for _ in samples]
        verdicts = iter(zip(answers, self.grader.verdicts(answers, owners), strict=True))
        return [
            {
                "index": item.index,
                "problem": item.problem,
                "label": item.label,
                "samples": [self._record(sample, *next(verdicts)) for sample in samples],
            }
            for item, samples in zip(items, outputs, strict=True)
        ]

    @staticmethod
    def _record(sample, answer: str | None, verdict: tuple[bool, str]) -> dict:
        right, why = verdict
        return {
            "right": right,
            "answer": answer,
            "verdict": why,
            "tokens": len(sample.token_ids),
            "finish": sample.finish_reason,
            "text": sample.text,
        }

    def token_ids(self, item: Item) -> list[int]:
        """The prompt as training would build it: the template, then the tokenizer's chat template if `chat`."""
        tokenizer = self.llm.get_tokenizer()
        text = item.prompt(self.settings.template)
        if self.settings.chat:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
