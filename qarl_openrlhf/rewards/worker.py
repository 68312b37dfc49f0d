"""One judging process: reads `[answer, label]` as a JSON line, writes `true` or `false`; `"ready"` once it has started.

A process of its own, because math-verify's time limits are signals, which only a main thread may set, and because sympy can
spend hours in one C call or eat all memory on a short expression. Limits: an alarm that ends the process when the pool's own
limit failed to (its owner may have died), and RLIMIT_AS.

    python -m qarl_openrlhf.rewards.worker SECONDS MEBIBYTES
"""

import json
import os
import resource
import signal
import sys
import warnings


def main() -> None:
    seconds, mebibytes = float(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no verdict
    warnings.simplefilter("ignore")
    import math_verify  # noqa: F401  the slow import, before "ready"

    from qarl_openrlhf.rewards.judge import is_right

    is_right("\\frac{1}{2}", "0.5")  # builds the parser's tables
    resource.setrlimit(resource.RLIMIT_AS, (mebibytes * 2**20,) * 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's; the end of stdin ends us
    answers.write('"ready"\n')
    answers.flush()
    for line in sys.stdin:
        answer, label = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # SIGALRM's default action ends the process
        try:
            verdict = bool(is_right(answer, label))
        except (Exception, RecursionError, MemoryError):  # not parsed, not comparable: not the label
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write("true\n" if verdict else "false\n")
        answers.flush()


if __name__ == "__main__":
    main()
