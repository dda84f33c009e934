"""Scorers made of functions that know nothing of kvpolicy, and `by_row`, which keeps padding from them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpolicy.contract import RESERVED, fault
from kvpolicy.errors import PluginError
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs

DATA = (
    *("queries", "query_positions", "keys", "values", "pre_rope_keys", "modality", "call"),
    *("repetition", "similarity", "positions", "candidates", "scaling", "layer"),
)
"""What a wrapped function may ask of a view, by the names of its parameters."""


def by_row(
    view: LayerView, score: Callable[[LayerView], Tensor], *, reader: str = "by_row", among: Tensor | None = None
) -> Tensor:
    """Return float32 ``[B, Hkv, T]``: what `score` says of each row's valid slots alone, 0 at the others.

    So `score` meets no padding, no empty slots and no queries that do not exist. It is called once a row; where the
    heads of a row hold different slots, once a head.

    Args:
        view: the slots.
        score: given a view of one row, ``[1, H, n, D]``, returns ``[1, H, n]`` of any float dtype.
        reader: what an error calls `score`.
        among: bool ``[B, Hkv, T]``, the slots that `score` is given, such as ``view.candidates``; default: the valid.

    Raises:
        PluginError: when `score` returns anything else.

    >>> valid = torch.tensor([[False, True, True]])
    >>> view = LayerView(keys=torch.ones(1, 1, 3, 4), values=torch.ones(1, 1, 3, 4), valid=valid)
    >>> by_row(view, lambda row: row.keys.sum(-1) / row.slots).tolist()
    [[[0.0, 2.0, 2.0]]]
    """
    scores = torch.zeros(view.valid.shape, dtype=torch.float32, device=view.valid.device)
    for row, valid in enumerate(view.valid if among is None else among):
        alike = bool((valid == valid[:1]).all())
        every = [slice(None)] if alike else [slice(head, head + 1) for head in range(len(valid))]
        for heads in every:
            slots = valid[heads][0].nonzero()[:, 0]
            if len(slots):
                part = view.part(row, heads, slots)
                scores[row, heads, slots] = _checked(score(part), part, reader)[0]
    return scores


def _checked(found: Any, part: LayerView, reader: str) -> Tensor:
    expected = f"{reader}: expected a float tensor {list(part.valid.shape)} (one row, KV heads, slots)"
    if not isinstance(found, Tensor):
        raise PluginError(f"{expected}, got {type(found).__name__}")
    if found.shape != part.valid.shape or not found.is_floating_point():
        raise PluginError(f"{expected}, got {found.dtype} {list(found.shape)}")
    return found.float()


def wrap_score(
    function: Callable[..., Tensor],
    *,
    needs: Needs | Callable[[Any], Needs],
    name: str | None = None,
    role: str = "importance",
    source: str = "",
    formula: str = "",
) -> type[Any]:
    """Return a scorer class that scores by a function of tensors.

    A parameter that is called like a tensor of a view is given it, one row at a time and without padding: ``queries
    [1, Hq, W, Dk]``, ``query_positions [1, W]``, ``keys [1, Hkv, n, Dk]``, ``values [1, Hkv, n, Dv]``,
    ``pre_rope_keys``, ``modality``, ``call``, ``repetition``, ``positions`` and ``candidates [1, Hkv, n]``,
    ``similarity [1]``, ``scaling`` and ``layer``.
    Keys and values are in the model's dtype. Any other parameter is a setting and needs an annotation. The class
    pickles where it stands in the module of the function under its name in CamelCase: `h2o-window` as ``H2oWindow``.

    Args:
        function: returns float ``[1, Hkv, n]``, higher means keep.
        needs: what it reads, as of a scorer; or a function that returns it from the settings.
        name: what a policy file calls it; default: the function's name, with dashes.
        role: "importance", "diversity" or "other".
        source: paper and equation.
        formula: one line of maths.

    Raises:
        PluginError: when a parameter is neither data nor an annotated setting, or the class would break the contract of
            a scorer.

    >>> def loudest(keys: Tensor, power: float = 1.0) -> Tensor:
    ...     return keys.abs().amax(-1).pow(power)
    >>> Loudest = wrap_score(loudest, needs=Needs(keys=True))
    >>> scorer = Loudest(power=2)
    >>> scorer
    Loudest(power=2.0)
    >>> from kvpolicy import functional
    >>> functional.score(scorer, None, torch.tensor([[[[1.0], [-3.0]]]]), torch.zeros(1, 1, 2, 1)).tolist()
    [[[1.0, 9.0]]]
    """
    if not callable(function):
        raise PluginError(f"wrap_score: expected a function, got {function!r}")
    name = name or _name(function)
    module = getattr(function, "__module__", None) or type(function).__module__
    who = f"wrap_score of '{name}'"
    if not isinstance(needs, Needs) and not callable(needs):
        raise PluginError(f"{who}: needs: expected a kvpolicy.Needs, or a function that returns one, got {needs!r}")
    data, given = _parameters(function, who)

    def call(self: Any, view: LayerView) -> Tensor:
        own = {setting: getattr(self, setting) for setting in given}

        def score(row: LayerView) -> Tensor:
            return function(**{each: getattr(row, each) for each in data}, **own)

        return by_row(view, score, reader=f"scorer '{name}' ({module})")

    members = {
        "__annotations__": {setting: parameter.annotation for setting, parameter in given.items()},
        "__call__": call,
        "__doc__": function.__doc__,
        "__module__": module,
        "formula": formula,
        "name": name,
        "needs": needs if isinstance(needs, Needs) else property(needs),
        "role": role,
        "source": source,
        "wraps": function,
    }
    defaults = {
        setting: parameter.default for setting, parameter in given.items() if parameter.default is not parameter.empty
    }
    made: type[Any] = settings(type("".join(word.capitalize() for word in name.split("-")), (), members | defaults))
    if wrong := fault(made, "scorer"):
        raise PluginError(f"{who}: {wrong}")
    return made


def _name(function: Callable[..., Any]) -> str:
    """Return what a policy file calls the scorer of a function, by the function's own name."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise PluginError(f"wrap_score: expected name='...', what a policy file calls it, as {function!r} has no name")
    return re.sub("_+", "-", name.strip("_")).lower()


_RESERVED = (*RESERVED, "type", "wraps")


def _parameters(function: Callable[..., Any], who: str) -> tuple[list[str], dict[str, inspect.Parameter]]:
    """Return the names of the parameters that are data, and by name those that are settings, annotations resolved."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise PluginError(f"{who}: expected a function with a signature, such as a Python one: {error}") from error
    given = {}
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(f"{who}: expected parameters that can be given by name, got '{parameter}'")
        if name not in DATA:
            given[name] = _setting(name, parameter, function, who)
    return [name for name in parameters if name in DATA], given


def _setting(name: str, parameter: inspect.Parameter, function: Any, who: str) -> inspect.Parameter:
    """Return a parameter that is a setting, its annotation resolved."""
    data = ", ".join(DATA)
    if parameter.annotation is parameter.empty:
        raise PluginError(
            f"{who}: expected parameter '{name}' to be a setting with an annotation, such as `{name}: float = 1.0`, or "
            f"one of {data}"
        )
    if name in _RESERVED:
        raise PluginError(f"{who}: expected another name for the setting '{name}', which a scorer has already")
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            # As typing.get_type_hints, which would need the types of the tensors too.
            annotation = eval(annotation, getattr(function, "__globals__", {}))
        except NameError as error:
            raise PluginError(f"{who}: parameter '{name}': cannot resolve its annotation: {error}") from error
    if annotation is Tensor:
        raise PluginError(f"{who}: parameter '{name}' is a tensor: expected one of {data}")
    if isinstance(parameter.default, (list, dict, set)):
        raise PluginError(
            f"{who}: parameter '{name}': expected a default that cannot change, got {parameter.default!r}"
        )
    return parameter.replace(annotation=annotation)


__all__ = ["by_row", "wrap_score"]
