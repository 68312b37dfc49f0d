"""What bitsandbytes does in a run: an NF4 reference model and 8-bit moments of AdamW, and where they cannot work."""

from importlib.util import find_spec

from qarl_openrlhf.config import ConfigError, trained_roles
from qarl_openrlhf.planning.positions import load_config

INSTALL = "pip install --no-deps -r requirements/bitsandbytes.txt"


def add_flags(group) -> None:
    group.add_argument(
        "--ref.load_in_4bit",
        action="store_true",
        help="hold the reference model of the KL term in NF4 (bitsandbytes): 0.5 byte a weight, whole on every GPU",
    )
    for role in ("actor", "critic"):
        group.add_argument(
            f"--{role}.adam.state_bits",
            type=int,
            default=32,
            choices=[8, 32],
            help=f"with --{role}.optim adam, bits of a moment; 8: bitsandbytes' AdamW8bit, 2 bytes a weight in place of 8",
        )


def check_low_bit(args) -> None:
    """ConfigError for combinations of --ref.load_in_4bit, --actor.adam.state_bits and --critic... that cannot run."""
    if args.ref.load_in_4bit:
        _check_reference(args)
    for role in trained_roles(args):
        if getattr(args, role).adam.state_bits == 8:
            _check_moments(args, role)


def _check_reference(args) -> None:
    flag = "--ref.load_in_4bit"
    if args.algo.kl.init_coef == 0:
        raise ConfigError(
            f"{flag} without a KL term has no effect, as there is no reference model: drop it, or set --algo.kl.init_coef"
        )
    if args.ref.offload:
        raise ConfigError(
            f"{flag} with --ref.offload: DeepSpeed would move the weights, and NF4 weights are outside of it: use one of them"
        )
    _require_package(flag)
    if experts := getattr(load_config(args).get_text_config(), "num_experts", 0):
        raise ConfigError(
            f"{flag} quantizes linear layers, and the {experts} experts of {args.actor.model_name_or_path}, most of its "
            "weights, are fused tensors that bitsandbytes leaves in BF16: use --ref.offload, or --ds.zero_stage 3"
        )


def _check_moments(args, role: str) -> None:
    flag = f"--{role}.adam.state_bits 8"
    if getattr(args, role).optim != "adam":
        raise ConfigError(
            f"{flag} is for AdamW, and --{role}.optim is {getattr(args, role).optim}: its states stay float32; drop one of them"
        )
    if args.ds.adam_offload:
        raise ConfigError(
            f"{flag} with --ds.adam_offload: AdamW in main memory has float32 states, none on a GPU: use one of them"
        )
    if args.ds.zero_stage == 0 or (args.ds.zero_stage == 1 and args.ds.grad_accum_dtype == "fp32"):
        what = "zero_stage 0" if args.ds.zero_stage == 0 else "grad_accum_dtype fp32 at stage 1"
        raise ConfigError(f"{flag} does not run with --ds.{what}: use --ds.zero_stage 2 (or 1, 3)")
    if args.ds.use_universal_ckpt:
        raise ConfigError(
            f"{flag} with --ds.use_universal_ckpt: DeepSpeed would reshape 8-bit codes as if they were float32: use one of them"
        )
    _require_package(flag)


def _require_package(flag: str) -> None:
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{flag} needs bitsandbytes, which is not installed: {INSTALL}")
