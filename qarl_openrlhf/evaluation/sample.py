"""Sample k responses to each item of a task with a vLLM engine, judge them, and keep every one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qarl_openrlhf.evaluation.grade import CodeGrader, MathGrader
from qarl_openrlhf.evaluation.items import Item, Settings
from qarl_openrlhf.evaluation.records import Records
from qarl_openrlhf.evaluation.scores import task_scores
from qarl_openrlhf.rewards.answers import with_opened_thinking

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
        tokenizer, texts = self.llm.get_tokenizer(), [self.prompt_text(item) for item in items]
        prompts = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
        params = [
            SamplingParams(n=k, temperature=s.temperature, top_p=s.top_p, max_tokens=s.max_tokens, seed=item.seed(s.seed))
            for item in items
        ]
        outputs = [output.outputs for output in self.llm.generate(prompts, params, use_tqdm=False)]
        answers = [
            self.grader.answer(with_opened_thinking(text, sample.text))
            for text, samples in zip(texts, outputs, strict=True)
            for sample in samples
        ]
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

    def prompt_text(self, item: Item) -> str:
        """The prompt as training would build it: the template, then the tokenizer's chat template if `chat`."""
        text = item.prompt(self.settings.template)
        if not self.settings.chat:
            return text
        chat = [{"role": "user", "content": text}]
        return self.llm.get_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
