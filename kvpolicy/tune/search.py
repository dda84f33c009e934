"""The search: which policies of a space are tried, one after the other, for the least drift. Optuna decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvpolicy.errors import PolicyFileError, UnsupportedModelError, not_installed
from kvpolicy.eval.tasks.example import Stretch
from kvpolicy.policy import Policy
from kvpolicy.tune.record import NotFiniteError, TuneError
from kvpolicy.tune.space import Choices, Setting, Space

if TYPE_CHECKING:
    import optuna

STARTUP = 5
"""How many trials are measured on all texts before one may be given up: the default of Optuna's median pruner."""
SPARED = 4
"""One in how many texts, the first ones, is too few to give a trial up by."""

Measure = Callable[[Policy, Stretch], float]
"""Returns the drift of a policy on a text."""


@dataclass(frozen=True)
class Trial:
    """A policy that was measured.

    Args:
        number: 0 for the policy as it is, then from 1.
        settings: what was tried, by place; empty for the policy as it is.
        policy: with these settings.
        kl: drift on each text that it was measured on, in nats a token.
        given_up: whether the first texts were enough to see that it is worse than half of the others.
    """

    number: int
    settings: dict[str, Any]
    policy: Policy
    kl: tuple[float, ...]
    given_up: bool = False

    @property
    def mean(self) -> float:
        """Mean drift on the texts it was measured on."""
        return _means(self.kl)[-1]


@dataclass(frozen=True)
class Refusal:
    """Settings that were chosen and could not be measured.

    Args:
        number: from 1.
        settings: by place.
        reason: why.
    """

    number: int
    settings: dict[str, Any]
    reason: str


def require() -> None:
    """Raise where what searches is not installed.

    Raises:
        TuneError: when Optuna is not there.
    """
    if find_spec("optuna") is None:
        raise TuneError(not_installed("tuning", "Optuna", "tune"))


def search(
    space: Space, measure: Measure, texts: Sequence[Stretch], *, trials: int, seed: int
) -> Iterator[Trial | Refusal]:
    """Yield the policy as it is, then `trials` others, each once it has been tried; the same ones for equal arguments.

    Optuna's tree-structured Parzen estimator (arXiv 2304.11127) chooses, at first by chance. Drift is measured text by
    text, and a trial whose mean so far is worse than the median of the earlier ones at that text is given up.

    Args:
        space: what to search.
        measure: what is to be small.
        texts: to measure on, in this order.
        trials: how many to try.
        seed: what decides by chance.

    Raises:
        KVPolicyError: when the policy as it is cannot be measured.
    """
    import optuna

    distributions = {setting.place: _distribution(setting) for setting in space.settings}
    with _quiet():
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=len(texts) // SPARED),
        )
    base = Trial(0, {}, space.base, tuple(measure(space.base, text) for text in texts))
    if (values := space.base_values()) is not None:
        # So that the search starts from it.
        study.add_trial(
            optuna.trial.create_trial(
                params=values,
                distributions=distributions,
                value=base.mean,
                intermediate_values=dict(enumerate(_means(base.kl))),
            )
        )
    yield base
    for number in range(1, trials + 1):
        asked = study.ask(distributions)
        trial = _tried(space, measure, texts, asked, number)
        if isinstance(trial, Refusal) or trial.given_up:
            study.tell(asked, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(asked, trial.mean)
        yield trial


def best(trials: Sequence[Trial | Refusal]) -> Trial:
    """Return the trial of the least drift on all texts; of equal ones, the first."""
    whole = [trial for trial in trials if isinstance(trial, Trial) and not trial.given_up]
    return min(whole, key=lambda trial: trial.mean)


def _tried(
    space: Space, measure: Measure, texts: Sequence[Stretch], asked: optuna.Trial, number: int
) -> Trial | Refusal:
    settings = space.shown(asked.params)
    found: list[float] = []
    try:
        policy = space.policy(asked.params)
        for step, text in enumerate(texts):
            found.append(measure(policy, text))
            asked.report(_means(found)[-1], step)
            if len(found) < len(texts) and asked.should_prune():
                return Trial(number, settings, policy, tuple(found), given_up=True)
    except (PolicyFileError, UnsupportedModelError, NotFiniteError) as error:
        return Refusal(number, settings, str(error))
    return Trial(number, settings, policy, tuple(found))


def _means(kl: Sequence[float]) -> list[float]:
    """Return the mean of the first, of the first two, and so on.

    >>> _means([1.0, 3.0])
    [1.0, 2.0]
    """
    return [total / count for count, total in enumerate(accumulate(kl), start=1)]


def _distribution(setting: Setting) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(setting, Choices):
        return CategoricalDistribution(range(len(setting.items)))
    if setting.whole:
        return IntDistribution(int(setting.low), int(setting.high), log=setting.log)
    return FloatDistribution(setting.low, setting.high, log=setting.log)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Optuna say nothing below a warning."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
