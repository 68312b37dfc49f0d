"""What other processes are doing, by the titles that Ray and vLLM give them; any of them may end while it is asked."""

import psutil


def command_line(process: psutil.Process) -> str:
    """"ray::QarlPolicyActor.fit"; "" of one that has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def with_words(words: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those with ``words`` in their command line."""
    return [process for process in processes if words in command_line(process)]
