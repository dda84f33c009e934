"""`analyze`: one prompt, a model and policies, all that is measured of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, cast

from torch import Tensor, nn

from kvpolicy.analysis.anisotropy import anisotropy
from kvpolicy.analysis.balance import joint_density, rank_correlation
from kvpolicy.analysis.kept import by_position, jaccard, votes
from kvpolicy.analysis.result import Analysis, Balance, ByHead, Kept, Likeness, Overlap
from kvpolicy.analysis.views import views
from kvpolicy.combiners.redundancy_adaptive import RedundancyAdaptive
from kvpolicy.config import load
from kvpolicy.errors import KVPolicyError, UnsupportedModelError
from kvpolicy.maths import cosine_redundancy, euclidean_redundancy
from kvpolicy.policy import Policy
from kvpolicy.session.decoder import find_decoders
from kvpolicy.session.inputs import Tokens, read
from kvpolicy.session.modality import placeholders
from kvpolicy.tree import evaluate
from kvpolicy.types import MODALITIES, LayerView, Modality, Needs

REFERENCE = "ecokv-snapkv"
"""The policy whose importance and diversity are measured, over the slots that it does not protect."""

FEWEST = 8
"""Slots by which vectors and scores are measured: fewer say little, and two always lie on a line."""
PARTS = 20
"""Parts of a histogram."""
STRETCHES = 64
"""Stretches of a prompt, where it has as many tokens."""


class AnalysisError(KVPolicyError, ValueError):
    """A prompt or the policies cannot be analysed."""


def analyze(
    model: nn.Module, inputs: Any, policies: Sequence[Policy], *, tokens: Sequence[str] | None = None, name: str = ""
) -> Analysis:
    """Return what is measured of one prompt: of its keys and values, and of what each policy keeps of it.

    The model reads the prompt once; nothing is evicted. Likeness and balance are measured over the slots that
    `REFERENCE` decides: all but the first 4 and the last 8.

    Args:
        model: any transformers decoder.
        inputs: ids ``[T]`` or ``[1, T]``, or the mapping that a tokenizer or processor returns, of one row.
        policies: each with a name of its own.
        tokens: the text of each token, see `kvpolicy.analysis.pieces`; default: their ids.
        name: what the model is called; default: its class.

    Raises:
        AnalysisError: when there is more than one row, padding, too short a prompt, or two policies of one name.
        ContextError: when the inputs are wrong.
        UnsupportedModelError: when no policy, or one of these, can act on the model.

    >>> import torch
    >>> from kvpolicy.testing.models import tiny
    >>> chosen = [load(each, budget=40) for each in ("snapkv", "key-norm")]
    >>> found = analyze(tiny(), torch.arange(100), chosen)
    >>> (found.layers, found.kept[0].lengths, [one.of for one in found.likeness])
    ([0, 1, 2], [[40, 40], [40, 40], [40, 40]], ['keys', 'keys before RoPE', 'values'])
    """
    decoder = find_decoders(model)[0]
    prompt, _ = read(inputs, "inputs", decoder.device)
    _check(prompt, policies, tokens)
    reference = load(REFERENCE)
    kinds = placeholders(getattr(model, "config", decoder.config))
    wanted = Needs(keys=True, values=True, modality=bool(kinds)) | reference.needs
    for policy in policies:
        wanted |= policy.needs
    seen, notes = _views(model, inputs, wanted, policies)

    decided = [reference.protect(view, reference.budget.slots(view.seen)) for view in seen]
    if int(decided[0].candidates[0, 0].sum()) < FEWEST:
        raise AnalysisError(
            f"expected a prompt of {reference.select.protects + FEWEST} tokens or more, got {prompt.length}"
        )
    notes += _too_few(decided[0])
    keeps = [
        [one.to_mask(view.slots).cpu() for one, view in zip(policy.plan(seen), seen, strict=True)]
        for policy in policies
    ]
    for policy, keep in zip(policies, keeps, strict=True):
        if not policy.trivial and all(bool(layer.all()) for layer in keep):
            notes.append(f"policy '{policy.name}': its budget holds the whole prompt, nothing is evicted")
    return Analysis(
        model=name or type(model).__name__,
        tokens=list(tokens) if tokens is not None else [str(one) for one in prompt.ids[0].tolist()],
        layers=[view.layer for view in seen],
        likeness=list(_likeness(decided)),
        balance=_balance(decided, cast(RedundancyAdaptive, reference.score)),
        kept=[_kept(policy, keep, seen) for policy, keep in zip(policies, keeps, strict=True)],
        overlap=list(_overlap(policies, keeps)),
        modality=_modality(seen[0]),
        notes=notes,
    )


def _check(prompt: Tokens, policies: Sequence[Policy], tokens: Sequence[str] | None) -> None:
    if len(prompt.ids) != 1 or prompt.padded:
        got = f"{len(prompt.ids)} rows" if len(prompt.ids) != 1 else "padding"
        raise AnalysisError(f"inputs: expected one prompt without padding, got {got}")
    if tokens is not None and len(tokens) != prompt.length:
        raise AnalysisError(f"tokens: expected the text of each of {prompt.length} tokens, got {len(tokens)}")
    names = [policy.name for policy in policies]
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice or not names:
        got = f"{', '.join(map(repr, twice))} more than once" if twice else "none"
        raise AnalysisError(f"policies: expected one or more, each with a name of its own, got {got}")


def _views(
    model: nn.Module, inputs: Any, needs: Needs, policies: Sequence[Policy]
) -> tuple[tuple[LayerView, ...], list[str]]:
    """Return the views, with keys before RoPE where the model shows them, and what there is to say of that."""
    try:
        return views(model, inputs, needs | Needs(pre_rope=True)), []
    except UnsupportedModelError as error:
        asking = [policy.name for policy in policies if policy.needs.pre_rope]
        if asking:
            raise UnsupportedModelError(f"policy '{asking[0]}' reads keys before RoPE: {error}") from error
        # Any other reason comes up again.
        return views(model, inputs, needs), [f"no keys before RoPE: {error}"]


def _likeness(seen: Sequence[LayerView]) -> Iterator[Likeness]:
    vectors: dict[str, Callable[[LayerView], Tensor | None]] = {
        "keys": lambda view: view.keys,
        "keys before RoPE": lambda view: view.pre_rope_keys,
        "values": lambda view: view.values,
    }
    for of, take in vectors.items():
        if take(seen[0]) is None:
            continue
        for slots, masks in _masks(seen):
            pairs = [(cast(Tensor, take(view)), mask) for view, mask in zip(seen, masks, strict=True)]
            measured = (_by_head(pairs, measure) for measure in (cosine_redundancy, euclidean_redundancy, anisotropy))
            yield Likeness(of, slots, *measured)


def _masks(seen: Sequence[LayerView]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the slots that count: all of them, then those of each modality, where there are several, and enough."""
    yield "all", [view.candidates for view in seen]
    for name, count in _modalities(seen[0]).items():
        if count >= FEWEST:
            yield name, [view.candidates & view.holds([name]) for view in seen]


def _too_few(view: LayerView) -> list[str]:
    return [
        f"{name}: {count} slots are too few to say how alike they are; {FEWEST} would do"
        for name, count in _modalities(view).items()
        if count < FEWEST
    ]


def _modalities(view: LayerView) -> dict[Modality, int]:
    """Return how many slots of each modality are decided, where there are several."""
    if view.modality is None:
        return {}
    counts = {name: int((view.candidates & view.holds([name]))[0, 0].sum()) for name in MODALITIES}
    there = {name: count for name, count in counts.items() if count}
    return there if len(there) > 1 else {}


def _by_head(pairs: Iterable[tuple[Tensor, Tensor]], measure: Callable[[Tensor, Tensor], Tensor]) -> ByHead:
    return [measure(vectors, mask)[0].tolist() for vectors, mask in pairs]


def _balance(seen: Sequence[LayerView], score: RedundancyAdaptive) -> Balance:
    correlation, density = [], []
    for view in seen:
        importance, diversity = (evaluate(part, view)[0] for part in (score.importance, score.diversity))
        correlation.append(rank_correlation(importance, diversity, view.candidates)[0].tolist())
        density.append(joint_density(importance, diversity, view.candidates, PARTS).cpu())
    mean = sum(density[1:], density[0]) / len(density)
    return Balance(REFERENCE, correlation, mean.tolist())


def _kept(policy: Policy, keep: Sequence[Tensor], seen: Sequence[LayerView]) -> Kept:
    stretches = min(STRETCHES, seen[0].slots)
    return Kept(
        policy=policy.name,
        budget=policy.to_dict()["budget"],
        slots=[[head.nonzero().flatten().tolist() for head in layer[0]] for layer in keep],
        lengths=[layer[0].sum(-1).tolist() for layer in keep],
        votes=votes(keep)[0].tolist(),
        positions=[
            by_position(layer, view.valid.cpu(), stretches).tolist() for layer, view in zip(keep, seen, strict=True)
        ],
    )


def _overlap(policies: Sequence[Policy], keeps: Sequence[Sequence[Tensor]]) -> Iterator[Overlap]:
    for (one, keep), (other, against) in combinations(zip(policies, keeps, strict=True), 2):
        by_layer = [jaccard(*layers) for layers in zip(keep, against, strict=True)]
        yield Overlap((one.name, other.name), by_layer)


def _modality(view: LayerView) -> list[str] | None:
    return None if view.modality is None else [MODALITIES[code] for code in view.modality[0, 0].tolist()]
