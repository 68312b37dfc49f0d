"""Runs one program that a model wrote. Started by `evaluation/sandbox.py` as `python -I -B sandbox_child.py DESCRIPTOR`.

Standard library only.

The descriptor holds a request as JSON: {"program", "function", "arguments", "cpu_s", "memory_mb"}. Without a function the
program reads stdin and writes stdout; with one, `function` of the program (or of its class Solution) is called and what it
returns is written to stdout as JSON. Exit status: 0, MEMORY, ERROR (traceback on stderr), or UNPROTECTED where the sandbox
could not be closed: then nothing of the program has run.

Before the program runs, limits of CPU time, memory and files are set, and a seccomp filter lets the kernel serve only the
system calls listed below. It cannot be taken off again, and threads inherit it. There is no socket, no new process, no signal to
others, and no file can be opened for writing, made, renamed or removed; those calls fail with EPERM.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys
from importlib import import_module

MEMORY, ERROR, UNPROTECTED = 77, 1, 78

# x86-64. What an interpreter needs to compute, read files, tell the time and use threads.
ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25,
    "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getitimer": 36, "alarm": 37,
    "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96,
    "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
    "getegid": 108, "getppid": 110, "sigaltstack": 131, "statfs": 137, "fstatfs": 138, "arch_prctl": 158,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "get_robust_list": 274, "dup3": 292, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334,
    "close_range": 436, "faccessat2": 439,
}  # fmt: skip
OPEN, IOCTL, CLONE, FCNTL, TGKILL, OPENAT, PRLIMIT64, CLONE3 = 2, 16, 56, 72, 234, 257, 302, 435
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x10000
TERMINAL = (0x5401, 0x5450, 0x5451)  # TCGETS, FIONCLEX, FIOCLEX: what opening a file asks
DESCRIPTOR = (
    0,
    1,
    2,
    3,
    4,
    1030,
)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; not F_SETOWN, which sends signals

LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF: ld [k], jeq, jset, ret
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
ARCHITECTURE, NUMBER, ARGUMENTS = 4, 0, 16  # offsets in struct seccomp_data; an argument has 8 bytes, its low half first
X86_64 = 0xC000003E

# The usual modules of the standard library are there without an import, as answers to LiveCodeBench expect.
MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json builtins "
    "typing"
).split()


def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def seccomp_filter(pid: int) -> bytes:
    """The BPF program. pid: of this process, the only one that may be signalled."""
    allow, deny = instruction(RETURN, ALLOW), instruction(RETURN, FAIL | errno.EPERM)

    def argument(n: int, half: int = 0) -> bytes:
        return instruction(LOAD, ARGUMENTS + 8 * n + 4 * half)

    def one_of(values) -> bytes:
        return b"".join(instruction(EQUAL, value, 0, 1) + allow for value in values) + deny

    def no_bit_of(bits: int) -> bytes:
        return instruction(ANY_BIT, bits, 1, 0) + allow + deny

    cases = {
        OPENAT: argument(2) + no_bit_of(WRITING),
        OPEN: argument(1) + no_bit_of(WRITING),
        IOCTL: argument(1) + one_of(TERMINAL),
        FCNTL: argument(1) + one_of(DESCRIPTOR),
        CLONE: argument(0) + instruction(ANY_BIT, CLONE_THREAD, 0, 1) + allow + deny,
        TGKILL: argument(0) + one_of([pid]),
        # reading a limit: the pointer to a new one is null
        PRLIMIT64: argument(2)
        + instruction(EQUAL, 0, 1, 0)
        + deny
        + argument(2, 1)
        + instruction(EQUAL, 0, 1, 0)
        + deny
        + allow,
        CLONE3: instruction(RETURN, FAIL | errno.ENOSYS),  # its flags are in memory; glibc then takes clone
    }
    program = (
        instruction(LOAD, ARCHITECTURE)
        + instruction(EQUAL, X86_64, 1, 0)
        + instruction(RETURN, KILL)
        + instruction(LOAD, NUMBER)
    )
    for number in ALLOWED.values():
        program += instruction(EQUAL, number, 0, 1) + allow
    for number, code in cases.items():
        program += instruction(EQUAL, number, 0, len(code) // 8) + code
    return program + deny


def close_the_sandbox(cpu_s: int, memory_mb: int) -> None:
    """OSError where the kernel does not take a limit or the filter."""
    for name, value in (
        (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_mb * 2**20), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        resource.setrlimit(name, (value, value))
    code = seccomp_filter(os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    for option, first, second in ((38, 1, None), (22, 2, program)):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP with a filter
        if prctl(option, first, second, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def names() -> dict:
    """The program's module, with what MODULES export."""
    found = {"__name__": "__main__"}
    for name in MODULES:
        module = import_module(name)
        public = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
        found |= {each: getattr(module, each) for each in public}
    return found | {name: import_module(name) for name in MODULES if name != "builtins"}


def main() -> int:
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        request = json.load(file)
    answers = os.dup(1)
    if request["function"]:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the function prints is no answer
    module = names()
    try:
        if os.uname().machine != "x86_64":
            raise OSError(f"the filter is written for x86_64, this is {os.uname().machine}")
        close_the_sandbox(request["cpu_s"], request["memory_mb"])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return UNPROTECTED
    sys.setrecursionlimit(50_000)
    sys.argv = ["program.py"]
    try:
        exec(compile(request["program"], "program.py", "exec"), module)
        if request["function"]:
            holder = module["Solution"]() if "Solution" in module else None
            function = getattr(holder, request["function"]) if holder else module[request["function"]]
            returned = json.dumps(function(*request["arguments"])).encode()
            while returned:
                returned = returned[os.write(answers, returned) :]
        sys.stdout.flush()
    except SystemExit:
        pass  # a program's own way to end
    except MemoryError:
        return MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
