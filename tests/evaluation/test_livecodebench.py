"""LiveCodeBench: rows of its columns, programs in responses, verdicts of right and wrong programs, and the sandbox's walls."""

import base64
import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import pytest

from qarl_openrlhf.cli import evaluate
from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.data.sources import EVAL
from qarl_openrlhf.evaluation import sandbox
from qarl_openrlhf.evaluation.code_items import CodeItem, find_program, same_output, same_value
from qarl_openrlhf.evaluation.grade import CodeGrader
from qarl_openrlhf.evaluation.items import Settings, load_items
from qarl_openrlhf.evaluation.sample import Runner
from qarl_openrlhf.evaluation.scores import figure
from tests.tiny_models import make_tokenizer, save_tiny_model

SETTINGS = Settings("m", "bf16", "vllm", 0.6, 1.0, 8, "{problem}", False, 0)


def row(number: int, tests: list[tuple[str, str]], function: str | None = None) -> dict:
    """As in livecodebench/code_generation_lite: one public test, the others packed as it packs them."""
    kind = "functional" if function else "stdin"
    cases = [{"input": given, "output": expected, "testtype": kind} for given, expected in tests]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases[1:])))).decode()
    return {
        "question_title": f"Question {number}", "question_content": f"Add {number} to what is given.", "platform": "atcoder",
        "question_id": f"made_{number}", "contest_id": "made", "contest_date": "2025-01-01T00:00:00", "difficulty": "easy",
        "starter_code": "class Solution:\n    def add_all(self, a: int, b: List[int]) -> int:\n        " if function else "",
        "public_test_cases": json.dumps(cases[:1]), "private_test_cases": packed,
        "metadata": json.dumps({"func_name": function} if function else {}),
    }  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """One problem on stdin, one with a function."""
    rows = [row(1, [("1\n", "2"), ("41\n", "42\n"), ("-1", "0")]), row(2, [("2\n[1, 1]", "4"), ("0\n[]", "0")], "add_all")]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


ON_STDIN = "print(int(input()) + 1)"
FUNCTION = (
    "class Solution:\n    def add_all(self, a: int, b: List[int]) -> int:\n        print('seen')\n        return a + sum(b)"
)


def test_rows_become_items(made):
    stdin, function = load_items(f"code={made}")
    assert isinstance(stdin, CodeItem) and stdin.function is None and function.function == "add_all"
    assert "Add 1 to what is given." in stdin.problem and "standard input" in stdin.problem and "{" not in stdin.problem
    assert "def add_all(self, a: int" in function.problem and function.prompt("no template: {problem}") == function.problem
    assert [(test.input, test.output) for test in stdin.read_tests()] == [("1\n", "2"), ("41\n", "42\n"), ("-1", "0")]
    assert stdin.label.startswith("made_1: 1 public tests") and stdin.label != function.label
    assert [item.index for item in load_items(made, 1)] == [0]


def test_a_benchmark_s_name_wants_its_kind_of_rows(tmp_path, made):
    sums = tmp_path / "sums.jsonl"
    sums.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    with pytest.raises(DataError, match=f"{sums}, row 1 has no public_test_cases.*columns are problem, answer.*write own={sums}"):
        load_items(f"livecodebench={sums}")
    for name in EVAL:
        with pytest.raises(DataError, match=f"--tasks {name}={made}: {name} is a mathematics set.*write livecodebench={made}"):
            load_items(f"{name}={made}")
        assert load_items(f"{name}={sums}")[0].label == "2"
    assert isinstance(load_items(f"livecodebench={made}")[0], CodeItem) and isinstance(load_items(made)[0], CodeItem)


def test_from_the_hub_all_files_of_it(monkeypatch, made):
    """Its loading script is none that `datasets` runs any more: the files are read as they are."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: asked.append((args, kwargs)) or made)
    assert len(load_items("livecodebench")) == 12
    assert (
        asked[0] == (("livecodebench/code_generation_lite", "test.jsonl"), {"repo_type": "dataset"})
        and asked[5][0][1] == "test6.jsonl"
    )

    def offline(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(
        DataError, match="--tasks livecodebench: livecodebench/code_generation_lite .*--tasks livecodebench=FILE"
    ):
        load_items("livecodebench")


class Evil:
    def __reduce__(self):
        return (os.system, ("touch hit",))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()}, "asks for posix.system"),
        ({"private_test_cases": "not base64"}, "row 1, private_test_cases"),
        ({"public_test_cases": '[{"input": "1"}]'}, "row 1, public_test_cases"),
        ({"question_content": None}, "no text in question_content"),
        ({"metadata": "[]"}, "metadata is no JSON object"),
        ({"question_content": "Add \ud800."}, r"broken.jsonl, row 1: question_content has \\ud800 at character 5"),
        ({"question_id": "\udfff"}, r"broken.jsonl, row 1: question_id has \\udfff at character 1"),
        ({"starter_code": "\udc00"}, r"broken.jsonl, row 1: starter_code has \\udc00 at character 1"),
        ({"private_test_cases": '[{"input": "\ud800", "output": ""}]'}, r"broken.jsonl, row 1: private_test_cases has \\ud800"),
        ({"public_test_cases": '[{"input": "1", "output": "\\ud800"}]'}, r"broken.jsonl, row 1, public_test_cases.* has \\ud800"),
        ({"public_test_cases": "[" * 100_000}, "broken.jsonl, row 1, public_test_cases: no tests as .*RecursionError"),
        ({"public_test_cases": '[{"input": 1, "output": "1"}]'}, r"broken.jsonl, row 1, public_test_cases: no tests as"),
    ],
)
def test_broken_rows_are_named(tmp_path, monkeypatch, change, message):
    """Before a model is looked for, let alone sampled from."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(row(1, [("1", "2"), ("2", "3")]) | change))
    with pytest.raises(SystemExit, match=message):
        evaluate.main([".", "--out", "out", "--tasks", str(path)])
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("column, number", [("public_test_cases", 1), ("private_test_cases", 2)])
@pytest.mark.parametrize(
    "test, message",
    [
        (("2\n[1, 1", "4"), r"input '2\\n\[1, 1' is not one JSON value a line"),
        (("2 [1, 1]", "4"), "input '2 .1, 1.' is not one JSON value a line .Extra data"),
        (("nums = [1]", "4"), "input 'nums = .1.' is not one JSON value a line"),
        (("[" * 100_000, "4"), "input .* is not one JSON value a line .maximum recursion"),
        (("2\n[1, 1]", "four"), "output 'four' is not a JSON value"),
        (("2\n[1, 1]", ""), "output '' is not a JSON value"),
    ],
)
def test_broken_tests_of_a_function_are_named(tmp_path, monkeypatch, column, number, test, message):
    """Before a model is looked for; on stdin any text is a test."""
    monkeypatch.chdir(tmp_path)
    good = ("0\n[]", "0")
    tests = [test, good, good] if number == 1 else [good, good, test]
    for function in ("add_all", None):
        rows = [row(1, [good, good], function), row(2, tests, function)]
        (tmp_path / "broken.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        if function:
            with pytest.raises(SystemExit, match=f"broken.jsonl, row 2, {column}, test {number}: {message}"):
                evaluate.main([".", "--out", "out", "--tasks", "broken.jsonl"])
        else:
            assert len(load_items("broken.jsonl")[1].read_tests()) == 3


@pytest.mark.parametrize(
    "response, program",
    [
        ("So:\n```python\nprint(1)\n```\n", "print(1)\n"),
        ("First\n```python\nprint(1)\n```\nbetter\n```py\nprint(2)\n```", "print(2)\n"),
        ("<think>```python\nprint(1)\n```</think>\n```\nprint(3)\n```", "print(3)\n"),
        ("Sample:\n```text\n1\n```\nSolution:\n```python\nprint(4)\n```", "print(4)\n"),
        ("```pseudocode\nfor i\n```\n```Python title=a.py\nprint(5)\n```\nIt prints\n```json\n5\n```", "print(5)\n"),
        ("```cpp\nint main() {}\n```", None),
        ("```text\n1 2\nSo:\n```python\nprint(6)\n```", "print(6)\n"),
        ("```cpp\nx\n``` that was C++\n```python\nprint(7)\n```", "print(7)\n"),
        ("```markdown\nSolution:\n```python\nprint(8)\n```\n```", "print(8)\n"),
        ("```bash\npip\n\n```python\nprint(9)\n```", "print(9)\n"),
        ("```python\nprint('``` in a string')\n```", "print('``` in a string')\n"),
        ("<think>```python\nprint(1)\n```", None),
        ("```python\nprint(1)", None),
        ("```python\n\n```", None),
        ("print(1)", None),
    ],
)
def test_the_program_in_a_response(response, program):
    assert find_program(response) == program


def test_outputs_are_compared_as_the_benchmark_does():
    for written, expected in (
        ("1\n2\n", "1\n2"),
        (" 1 \n 2", "1\n2"),
        ("1.50 2", "1.5 2.0"),
        ("1e3", "1000"),
        ("yes", "yes\n"),
    ):
        assert same_output(written, expected), written
    for written, expected in (
        ("1\n2", "1 2"),
        ("1\n\n2", "1\n2"),
        ("Yes", "yes"),
        ("", "0"),
        ("50000000000000001", "50000000000000000"),
        ("nan x", "nan y"),
    ):
        assert not same_output(written, expected), written
    assert (
        same_value("[1, 2]", "[1,2]")
        and same_value("1.0", "1")
        and not same_value("[2, 1]", "[1,2]")
        and not same_value("", "1")
    )


def test_verdicts(made):
    stdin, function = load_items(made)
    programs = {
        ON_STDIN: (stdin, True, "ok"),
        "import sys\nn = int(sys.stdin.readline())\nif __name__ == '__main__':\n    print(n + 1); sys.exit(0)": (
            stdin,
            True,
            "ok",
        ),
        "print(2)": (stdin, False, "wrong at test 2 of 3"),
        "n = int(input())\nprint(2 if n == 1 else 1 / 0)": (
            stdin,
            False,
            "error at test 2 of 3 (ZeroDivisionError: division by zero)",
        ),
        "print('": (stdin, False, "error at test 1 of 3 (SyntaxError: unterminated string literal (detected at line 1))"),
        FUNCTION: (function, True, "ok"),
        "def add_all(a, b): return a + sum(b)": (function, True, "ok"),
        "def other(a, b): return 4": (function, False, "error at test 1 of 2 (KeyError: 'add_all')"),
        "import sys\ndef add_all(a, b): sys.stdout.write('4'); return None": (function, False, "wrong at test 1 of 2"),
    }
    items = [item for item, _, _ in programs.values()]
    found = CodeGrader(workers=2).verdicts([*programs, None], [*items, stdin])
    assert found == [(right, why) for _, right, why in programs.values()] + [(False, "no answer")]


def test_pass_at_k_of_a_run(tmp_path, made):
    """The real runner and grader; only the engine is scripted: sample 2 of 4 solves the first problem, none the second."""

    class Scripted:
        def get_tokenizer(self):
            return make_tokenizer()

        def generate(self, prompts, params, use_tqdm):
            texts = ["none", "```python\nprint(0)\n```", f"```python\n{ON_STDIN}\n```", "```python\nwhile 1: 1 / 0\n```"]
            sample = [SimpleNamespace(text=text, token_ids=[1], finish_reason="stop") for text in texts]
            return [SimpleNamespace(outputs=sample) for _ in prompts]

    runner = Runner(Scripted(), SETTINGS, tmp_path, CodeGrader(workers=2))
    scores = runner.run(load_items(f"livecodebench={made}"), 4, progress=lambda line: None)
    assert (scores["avg"], scores["pass"]["4"], scores["no_answer"]) == (1 / 8, 1 / 2, 1 / 4)
    assert figure(scores) == ("pass@4", 0.5)
    record = json.loads((tmp_path / "livecodebench.jsonl").read_text().splitlines()[0])
    assert [sample["right"] for sample in record["samples"]] == [False, False, True, False]
    (tmp_path / "summary.json").write_text(json.dumps({"tasks": {"livecodebench": scores, "math500": {"avg": 0.25}}}))
    assert "| math500 | livecodebench pass@4 | average |" in evaluate.table.markdown(evaluate.table.read_runs([str(tmp_path)]))


@pytest.mark.slow
def test_a_whole_evaluation(tmp_path, made):
    """With vLLM; a random model writes no program, and its samples are kept all the same."""
    model, out = save_tiny_model(tmp_path / "model", "qwen3", hidden=128), tmp_path / "out"
    command = [sys.executable, "-m", "qarl_openrlhf.cli.evaluate", model, "--tasks", f"livecodebench={made}", "--out", str(out)]
    done = subprocess.run([*command, "--max_tokens", "32", "--workers", "1"], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| run | livecodebench pass@4 | average |" in done.stdout
    scores = json.loads((out / "summary.json").read_text())["tasks"]["livecodebench"]
    assert (scores["items"], scores["k"], scores["headline"]) == (2, 4, "pass")
    records = [json.loads(line) for line in (out / "livecodebench.jsonl").read_text().splitlines()]
    assert [sample["verdict"] for record in records for sample in record["samples"]] == ["no answer"] * 8


# ---- the walls. Each program would print "out" if it got through.
ATTACKS = {
    "a TCP connection": "import socket; socket.create_connection(('127.0.0.1', PORT)); print('out')",
    "a socket of any kind": "import socket; socket.socket(socket.AF_UNIX); print('out')",
    "a process": "import os; os.fork(); print('out')",
    "a program": "import os; os.execv('/bin/echo', ['echo', 'out'])",
    "a subprocess": "import subprocess; subprocess.run(['echo', 'out'])",
    "a process pool": "import multiprocessing\nwith multiprocessing.Pool(1) as pool: print('out')",
    "a new file": "open('PATH/new', 'w'); print('out')",
    "more in a file": "open('PATH/kept', 'a').write('more'); print('out')",
    "a file in memory": "import os; os.memfd_create('x'); print('out')",
    "a file less": "import os; os.unlink('PATH/kept'); print('out')",
    "another name": "import os; os.rename('PATH/kept', 'PATH/moved'); print('out')",
    "other rights": "import os; os.chmod('PATH/kept', 0o777); print('out')",
    "another's memory": "open('/proc/PARENT/mem', 'r+b'); print('out')",
    "a signal to its parent": "import os; os.kill(PARENT, 0); print('out')",
    "a signal by another way": "import ctypes; assert ctypes.CDLL(None).syscall(234, PARENT, PARENT, 0) == 0; print('out')",
    "a signal by a file's owner": "import ctypes; assert ctypes.CDLL(None).fcntl(1, 8, PARENT) == 0; print('out')",
    "more memory than allowed": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('out')",
    "other limits for its parent": "import resource; resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (9, 9)); print('out')",
    "a new session": "import os; os.setsid(); print('out')",
    "a namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0; print('out')",
    "a call of the 32-bit interface": "import ctypes; assert ctypes.CDLL(None).syscall(0x40000000 + 41, 1, 1, 0) >= 0; print('out')",
    "a weaker filter": "import ctypes; assert ctypes.CDLL(None).prctl(22, 0, 0, 0, 0) == 0; print('out')",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wall(attack, tmp_path):
    import socket

    (tmp_path / "kept").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            ATTACKS[attack]
            .replace("PATH", str(tmp_path))
            .replace("PARENT", str(os.getpid()))
            .replace("PORT", str(server.getsockname()[1]))
        )
        outcome = sandbox.run(program)
    assert outcome.status == "error" and b"out" not in outcome.stdout
    assert (tmp_path / "kept").read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_same_programs_get_through_without_walls(tmp_path):
    """So that the list above tests the walls and not its own mistakes."""
    (tmp_path / "kept").write_text("kept")
    for attack in ("a socket of any kind", "a process", "a new file", "a file in memory", "a new session", "other rights"):
        program = ATTACKS[attack].replace("PATH", str(tmp_path))
        assert (
            "out"
            in subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, start_new_session=False).stdout
        ), attack


def test_what_a_program_may_do():
    outcome = sandbox.run(
        "import sys, threading, time, os\n"
        "import numpy as np\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def main():\n"
        "    print(deep(40000), int((np.ones((9, 9)) @ np.ones(9)).sum()), gcd(6, 4), Counter('aab')['a'], pow(2, 3, 5))\n"
        "    print(sys.stdin.read().split(), len(os.listdir('.')), 'HF_TOKEN' in os.environ)\n"
        "threading.stack_size(256 * 2**20)\n"
        "thread = threading.Thread(target=main); thread.start(); thread.join()\n",
        "a b\nc",
    )
    assert (outcome.status, outcome.stdout.decode().split("\n")) == ("ok", ["40000 81 2 2 3", "['a', 'b', 'c'] 0 False", ""]), (
        outcome
    )


@pytest.mark.parametrize(
    "program, status",
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("import os\nfor i in range(3): os.close(i)\nwhile True: pass", "timeout"),
        ("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("x = bytearray(2**30)", "memory"),
        ("import ctypes; ctypes.string_at(0)", "error"),
        ("import os; os.abort()", "error"),
        ("import sys; sys.exit('with a message')", "ok"),
    ],
)
def test_limits(program, status):
    started = time.monotonic()
    limits = sandbox.Limits(seconds=1, memory_mb=512)
    outcome = sandbox.run(program, limits=limits)
    assert outcome.status == status, outcome
    assert time.monotonic() - started < limits.wall_s + 5


def test_output_without_end_is_broken_off():
    outcome = sandbox.run("while True: print('x' * 10**6)")
    assert outcome.status == "output" and len(outcome.stdout) <= sandbox.OUTPUT_BYTES + 2**16


def test_nothing_runs_where_the_walls_do_not_stand(tmp_path, monkeypatch, made):
    sandbox.require()
    child = tmp_path / "sandbox_child.py"
    text = sandbox.CHILD.read_text()
    child.write_text(text.replace('os.uname().machine != "x86_64"', "True"))
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(DataError, match="cannot be walled in here, so none is run: the filter is written for x86_64"):
        sandbox.run(f"open('{tmp_path}/hit', 'w')")
    assert not (tmp_path / "hit").exists()
    child.write_text(text.replace("close_the_sandbox(request", "(lambda *_: None)(request"))  # walls that only seem to stand
    model = save_tiny_model(tmp_path / "model", "llama")
    with pytest.raises(SystemExit, match="a test program got a socket, a file, a signal, a process, a process"):
        evaluate.main([model, "--out", str(tmp_path / "o"), "--tasks", f"livecodebench={made}", "--max_tokens", "8"])
    assert not (tmp_path / "o").exists()
