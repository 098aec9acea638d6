"""What a training scheme may be attached to."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._errors import PleachSchemeError, PleachUnsupported

#: What trains a parameter now.
_attached: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

#: Optimizers whose step is more than a function of the gradient, by name.
_OTHER_OPTIMIZERS = {
    "LBFGS": "evaluates the loss several times in a step",
    "ZeroRedundancyOptimizer": "exchanges parameters by itself",
}


def parameters_of(model: Any, optimizer: Any) -> list[tuple[str, Any]]:
    """The parameters that the optimizer trains, with their names, in the model's order."""
    if not isinstance(model, torch.nn.Module):
        raise PleachSchemeError(f"{type(model).__name__} is no torch.nn.Module; pass the model")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PleachSchemeError("DistributedDataParallel averages gradients already; pass model.module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PleachSchemeError(f"{type(optimizer).__name__} is no torch.optim.Optimizer; pass the optimizer")
    kind = type(optimizer).__name__
    if kind in _OTHER_OPTIMIZERS:
        raise PleachUnsupported(f"{kind} {_OTHER_OPTIMIZERS[kind]}; take another optimizer")
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in trained]
    if len(named) != len(trained):
        raise PleachSchemeError("the optimizer has parameters that the model has not; attach a model that has all")
    for name, parameter in named:
        if hasattr(parameter, "device_mesh"):
            raise PleachUnsupported(
                f"parameter {name} is a DTensor, as of FSDP; pass a model with all parameters on each rank"
            )
        if parameter.device.type != "cpu":
            raise PleachUnsupported(
                f"parameter {name} is on {parameter.device}, and the vectors that schemes exchange lie in memory of the "
                "host; take model.cpu(), or average gradients by DistributedDataParallel over another backend"
            )
        if parameter.dtype != torch.float32:
            raise PleachUnsupported(
                f"parameter {name} is of {parameter.dtype}, and schemes train torch.float32; take model.float()"
            )
    return named


def attach_all(named: list[tuple[str, Any]], name_of_trainer: str) -> None:
    """From now on this trains the parameters. Raises PleachSchemeError if something else does, and changes nothing."""
    for name, parameter in named:
        if parameter in _attached:
            raise PleachSchemeError(f"parameter {name} has {_attached[parameter]} already; leave its block first")
    for _, parameter in named:
        _attached[parameter] = name_of_trainer


def detach_all(named: list[tuple[str, Any]]) -> None:
    """Nothing trains the parameters any more."""
    for _, parameter in named:
        _attached.pop(parameter, None)


def divided(named: list[tuple[str, Any]], modules: list[torch.nn.Module]) -> list[list[tuple[str, Any]]]:
    """The parameters of each module. Each parameter is in one module, and each module has at least one."""
    names = {id(parameter): name for name, parameter in named}
    rest, parts = dict(names), []
    for number, module in enumerate(modules):
        own = [parameter for parameter in module.parameters() if id(parameter) in names]
        if not own:
            raise PleachSchemeError(f"fragments[{number}] has no trained parameter; leave it out")
        for parameter in own:
            if rest.pop(id(parameter), None) is None:
                raise PleachSchemeError(
                    f"parameter {names[id(parameter)]} of fragments[{number}] is in a fragment before it; put modules "
                    "that share a parameter into one torch.nn.ModuleList"
                )
        parts.append([(names[id(parameter)], parameter) for parameter in own])
    for name in rest.values():
        raise PleachSchemeError(
            f"parameter {name} is in no fragment; add its module, or torch.nn.ParameterList([...]) of parameters of "
            "the model itself"
        )
    return parts


def expect_parameters(optimizer: Any, named: list[tuple[str, Any]]) -> None:
    """The optimizer has these parameters and no others."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own != {id(parameter) for _, parameter in named}:
        raise PleachSchemeError(
            f"{type(optimizer).__name__} has other parameters than those of the scheme; make it of the model's "
            "parameters before the block"
        )
