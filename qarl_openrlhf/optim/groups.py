"""Which parameter is updated by which rule.

Muon is for the weight matrices of the decoder layers (every expert's gate, up and down projection is one matrix of its own,
however they are stacked). Embeddings, lm_head, router gates, norms and biases get AdamW, norms and biases without decay.
"""

from torch import nn

from qarl_openrlhf.quant import experts
from qarl_openrlhf.quant.names import DECODER_LAYER, ROUTER_GATES


def matrix_shapes(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Parameter name -> (count, rows, columns): the matrices lying one after the other in it that Muon updates."""
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and DECODER_LAYER.search(f"{name}.") and name.rsplit(".", 1)[-1] not in ROUTER_GATES:
            shapes[f"{name}.weight"] = (1, *_shape(module.weight))
    for name, module in experts.expert_modules(model).items():
        if experts.problem(module) is None and DECODER_LAYER.search(f"{name}."):
            e, n, k = _shape(module.gate_up_proj)
            shapes[f"{name}.gate_up_proj"] = (2 * e, n // 2, k)  # gate rows first, then up, expert by expert
            shapes[f"{name}.down_proj"] = _shape(module.down_proj)
    return shapes


def parameter_groups(model: nn.Module, muon: dict, adam: dict) -> list[dict]:
    """Parameter groups for :class:`qarl_openrlhf.optim.muon.Muon`.

    muon: lr, momentum, nesterov, ns_steps, scale. adam: lr, betas, eps, weight_decay (of the matrices, too).
    """
    matrices = matrix_shapes(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names = {"muon": [], "decay": [], "plain": []}
    for name, parameter in trained:
        kind = "muon" if name in matrices else "decay" if len(_shape(parameter)) > 1 else "plain"
        names[kind].append(name)
    by_name = dict(trained)
    adamw = {"algorithm": "adamw", "lr": adam["lr"], "betas": tuple(adam["betas"]), "eps": adam["eps"]}
    rules = {
        "muon": {
            "algorithm": "muon",
            "lr": muon["lr"],
            "momentum": muon["momentum"],
            "nesterov": muon["nesterov"],
            "ns_steps": muon["ns_steps"],
            "scale": muon["scale"],
            "weight_decay": adam["weight_decay"],
        },
        "decay": adamw | {"weight_decay": adam["weight_decay"]},
        "plain": adamw | {"weight_decay": 0.0},
    }
    return [{"params": [by_name[n] for n in names[kind]], **rules[kind]} for kind in names if names[kind]]


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
