"""GPUs, NCCL, main memory, /dev/shm, disk, compiler."""

from qarl_openrlhf.doctor.finding import Finding, fail, ok, warn
from qarl_openrlhf.doctor.machine import GIB, Machine

MIN_MEMORY = {"cpu": 8 * GIB, "cuda": 16 * GIB}
MIN_DISK = 2 * GIB  # logs and Ray's session; checkpoints come on top
SHM_RAY = 80 * 2**20  # the smallest object store that Ray takes
SHM_NCCL = 1 * GIB  # several GPUs of one host exchange through /dev/shm; a container's default is 64 MiB
MIN_CAPABILITY = (8, 0)  # BF16 tensor cores


def check_resources(machine: Machine, device: str, parameters: int | None = None) -> list[Finding]:
    """parameters: of the model to be trained, for what a checkpoint takes."""
    findings = [fail("torch", error, f"bash scripts/setup_env.sh --{device}") for error in machine.errors]
    if device == "cpu":
        findings.append(ok("gpus", "none used: training on the CPU"))
    elif machine.gpus:
        findings += _gpus(machine) + _nccl(machine) + _attention(machine)
    else:
        findings.append(_no_gpu(machine))
    findings += _memory(machine, device)
    findings += _disk(machine, parameters)
    if machine.compiler is None:
        findings.append(
            fail(
                "compiler",
                "no g++: vLLM, Triton and DeepSpeed compile when they start",
                "apt-get install build-essential",
            )
        )
    if machine.open_files < 4096:
        findings.append(warn("files", f"{machine.open_files} open files allowed; Ray wants 65536", "ulimit -n 65536"))
    return findings


def _no_gpu(machine: Machine) -> Finding:
    if not machine.driver:
        fix = "install the driver, or run the container with --gpus all; --device cpu trains without"
        return fail("gpus", "no NVIDIA driver on this machine", fix)
    if not machine.cuda_build:
        return fail("gpus", "this torch is built without CUDA", "bash scripts/setup_env.sh --cuda")
    return fail("gpus", "no CUDA device is visible", "unset CUDA_VISIBLE_DEVICES")


def _gpus(machine: Machine) -> list[Finding]:
    findings = []
    for index, gpu in enumerate(machine.gpus):
        capability = ".".join(map(str, gpu.capability))
        if gpu.capability < MIN_CAPABILITY:
            findings.append(
                fail(
                    "gpus",
                    f"GPU {index} ({gpu.name}) has compute capability {capability}; BF16 needs 8.0",
                    "a GPU of the Ampere generation or later",
                )
            )
        elif gpu.free < 0.9 * gpu.total:
            used = (gpu.total - gpu.free) / GIB
            findings.append(
                warn(
                    "gpus",
                    f"GPU {index} ({gpu.name}): another process holds {used:.1f} GiB of {gpu.total / GIB:.1f}",
                    f"nvidia-smi -i {index}; end that process",
                )
            )
    kinds = {(gpu.name, gpu.capability) for gpu in machine.gpus}
    if len(kinds) > 1:
        findings.append(
            warn(
                "gpus",
                f"several kinds: {', '.join(sorted(name for name, _ in kinds))}; sleep mode and ipc assume one kind",
                "CUDA_VISIBLE_DEVICES with GPUs of one kind",
            )
        )
    if not findings:
        first = machine.gpus[0]
        findings.append(
            ok(
                "gpus",
                f"{len(machine.gpus)} x {first.name}, {first.total / GIB:.0f} GiB, capability {'.'.join(map(str, first.capability))}",
            )
        )
    return findings


def _nccl(machine: Machine) -> list[Finding]:
    if machine.nccl_error and len(machine.gpus) > 1:
        fix = "bash scripts/setup_env.sh --cuda, or VLLM_NCCL_SO_PATH=/path/to/libnccl.so.2"
        return [fail("nccl", f"the library does not load: {machine.nccl_error}", fix)]
    return [ok("nccl", machine.nccl)] if machine.nccl else []


def _attention(machine: Machine) -> list[Finding]:
    return [] if machine.flash_attn else [ok("attention", "no flash-attn: PyTorch's variable-length attention packs")]


def _memory(machine: Machine, device: str) -> list[Finding]:
    findings = []
    if machine.memory < MIN_MEMORY[device]:
        findings.append(
            fail(
                "memory",
                f"{machine.memory / GIB:.1f} GiB of main memory, {MIN_MEMORY[device] / GIB:.0f} needed",
                "a larger machine, or raise the container's limit (docker run --memory)",
            )
        )
    else:
        findings.append(
            ok(
                "memory",
                f"{machine.memory / GIB:.0f} GiB, {machine.memory_free / GIB:.0f} free; {machine.cores} cores",
            )
        )
    several = len(machine.gpus) > 1
    size = f"{machine.shm / 2**20:.0f} MiB"
    remount = "docker run --shm-size 16g (or --ipc host); else mount -o remount,size=16G /dev/shm"
    if several and machine.shm < SHM_NCCL:
        findings.append(fail("/dev/shm", f"{size}; NCCL between {len(machine.gpus)} GPUs needs 1 GiB", remount))
    elif machine.shm < SHM_RAY:
        findings.append(warn("/dev/shm", f"{size}; Ray's object store needs 80 MiB, and is put on disk", remount))
    else:
        findings.append(ok("/dev/shm", size))
    return findings


def _disk(machine: Machine, parameters: int | None) -> list[Finding]:
    free, where = machine.disk_free, f"for {machine.disk_path}"
    # FP32 master weights, two moments, the BF16 copy; the finished model and its export beside it.
    checkpoint = 14 * parameters if parameters else 0
    fix = "free some, or name another disk with --ckpt.path, --ckpt.output_dir and --metrics.dir (doctor --path)"
    if machine.unwritable:
        return [fail("disk", f"{machine.disk_path}: {machine.unwritable}", "name a directory that can be written to (doctor --path)")]
    if free < MIN_DISK:
        return [fail("disk", f"{free / GIB:.1f} GiB free {where}, at least {MIN_DISK / GIB:.0f} needed", fix)]
    if parameters and free < 4 * parameters + MIN_DISK:
        return [
            fail(
                "disk",
                f"{free / GIB:.1f} GiB free {where}; the finished model and its export take {4 * parameters / GIB:.1f}",
                fix,
            )
        ]
    if free < 2 * checkpoint:
        what = f"{free / GIB:.1f} GiB free {where}; one training checkpoint takes up to {checkpoint / GIB:.1f}, and a new one is "
        what += "written before the oldest goes"
        return [warn("disk", what, f"{fix}; --ckpt.max_num 1 keeps one")]
    return [ok("disk", f"{free / GIB:.0f} GiB free {where}")]
