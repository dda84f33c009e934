"""Outcome: what a search found, shown on text that it has not seen."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvpolicy.config import dump
from kvpolicy.eval.statistics import LEAST, Interval, interval
from kvpolicy.policy import Policy
from kvpolicy.tune.places import value_at
from kvpolicy.tune.search import Refusal, Trial, best
from kvpolicy.tune.space import Space


@dataclass(frozen=True)
class Comparison:
    """The drift of two policies on the same texts.

    Args:
        texts: how many.
        base: of the policy as it is.
        tuned: of the one found.
        difference: tuned less base, text by text: below 0, tuning helps.
    """

    texts: int
    base: Interval
    tuned: Interval
    difference: Interval

    @property
    def shown(self) -> Literal["better", "worse", "nothing"]:
        """What the difference shows: nothing of fewer texts than `LEAST`, or where its 95% interval holds 0."""
        low, high = self.difference.low, self.difference.high
        if self.texts < LEAST or low is None or high is None or low <= 0 <= high:
            return "nothing"
        return "better" if high < 0 else "worse"


def compare(base: Sequence[float], tuned: Sequence[float]) -> Comparison:
    """Return the drift of two policies, each given by text.

    >>> compare([0.5, 0.25] * 4, [0.25, 0.125] * 4).shown, compare([0.5, 0.25] * 4, [0.25, 0.5] * 4).shown
    ('better', 'nothing')
    """
    difference = [ours - theirs for ours, theirs in zip(tuned, base, strict=True)]
    return Comparison(len(base), interval(base), interval(tuned), interval(difference))


@dataclass(frozen=True)
class Outcome:
    """What came of a search.

    Args:
        space: what was searched.
        trials: the policy as it is, then all that were tried.
        base: drift of the policy as it is, on each text held out.
        tuned: that of the best.
    """

    space: Space
    trials: tuple[Trial | Refusal, ...]
    base: tuple[float, ...]
    tuned: tuple[float, ...]

    @property
    def best(self) -> Trial:
        """The trial of the least drift on the texts searched."""
        return best(self.trials)

    @property
    def searched(self) -> Comparison:
        """The drift on the texts searched, by which the best was chosen: it flatters."""
        (base,) = (trial for trial in self.trials if isinstance(trial, Trial) and trial.number == 0)
        return compare(base.kl, self.best.kl)

    @property
    def held_out(self) -> Comparison:
        """The drift on other texts."""
        return compare(self.base, self.tuned)

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """What was searched, by place: what was ``tried``, what it is in the policy ``as it is``, and ``tuned``."""
        base, tuned = dump(self.space.base), dump(self.best.policy)
        return {
            setting.place: {
                "tried": setting.tried,
                "as it is": value_at(base, setting.way),
                "tuned": value_at(tuned, setting.way),
            }
            for setting in self.space.settings
        }

    @property
    def counts(self) -> dict[str, int]:
        """How many trials, the policy as it is left out: ``tried``, ``given up`` and ``refused``."""
        refused = sum(isinstance(trial, Refusal) for trial in self.trials)
        given_up = sum(isinstance(trial, Trial) and trial.given_up for trial in self.trials)
        return {"tried": len(self.trials) - 1, "given up": given_up, "refused": refused}

    @property
    def refusals(self) -> dict[str, int]:
        """Why trials were refused, and how many for each reason, the most first."""
        return dict(Counter(trial.reason for trial in self.trials if isinstance(trial, Refusal)).most_common())

    def policy(self, file: Path) -> Policy:
        """Return the best policy, named after the file that it is written to."""
        description = f"{self.space.base.name}, its settings tuned by kvpolicy tune"
        return replace(self.best.policy, name=file.stem, description=description)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "settings": self.settings,
            "searched": dataclasses.asdict(self.searched),
            "held_out": {**dataclasses.asdict(self.held_out), "shown": self.held_out.shown},
            "refusals": self.refusals,
            "trials": [_plain(trial) for trial in self.trials],
        }


def _plain(trial: Trial | Refusal) -> dict[str, Any]:
    if isinstance(trial, Refusal):
        return dataclasses.asdict(trial)
    return {"number": trial.number, "settings": trial.settings, "kl": list(trial.kl), "given_up": trial.given_up}
