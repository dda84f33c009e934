"""Space: a policy, and what to try for some of its settings, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpolicy.config.build import build
from kvpolicy.config.dump import dump
from kvpolicy.config.source import Item
from kvpolicy.errors import PolicyFileError
from kvpolicy.policy import Policy
from kvpolicy.tune.places import Steps, put, value_at

Values = Mapping[str, int | float]
"""What a trial has at each place: the index of a choice, or a number within a range."""


@dataclass(frozen=True)
class Choices:
    """A setting that is one of several values.

    Args:
        place: of the setting.
        way: the steps to it.
        items: the values, at least two.
    """

    place: str
    way: Steps
    items: tuple[Item, ...]

    def item(self, value: int | float) -> Item:
        """Return the choice with the index `value`."""
        return self.items[int(value)]

    @property
    def tried(self) -> Any:
        """What is tried, as the file has it."""
        return [item.plain for item in self.items]

    def like(self, policy: Policy) -> Sequence[int]:
        """Return the values among which the policy's own is, if it is any."""
        return range(len(self.items))


@dataclass(frozen=True)
class Range:
    """A setting that is a number within bounds.

    Args:
        place: of the setting.
        way: the steps to it.
        low: the least that it may be.
        high: the most.
        log: whether ratios are searched evenly, not differences.
        whole: whether only whole numbers are.
        written: the range in the file.
    """

    place: str
    way: Steps
    low: int | float
    high: int | float
    log: bool
    whole: bool
    written: Item

    def item(self, value: int | float) -> Item:
        """Return the number `value`, as if it stood where the range does."""
        return replace(self.written, value=value)

    @property
    def tried(self) -> Any:
        """What is tried, as the file has it."""
        return self.written.plain

    def like(self, policy: Policy) -> Sequence[int | float]:
        """Return the policy's own value, if it is within the bounds."""
        own = value_at(dump(policy), self.way)
        is_number = isinstance(own, (int, float)) and not isinstance(own, bool)
        return [own] if is_number and self.low <= own <= self.high else []


Setting = Choices | Range


@dataclass(frozen=True)
class Space:
    """A policy and the settings that are searched.

    Args:
        base: the policy as it is.
        whole: the same as a mapping, what it extends looked up.
        settings: in the order of the file.
    """

    base: Policy
    whole: Item
    settings: tuple[Setting, ...]

    def policy(self, values: Values) -> Policy:
        """Return the policy with these values.

        Raises:
            PolicyFileError: when they do not go together, or the budget does not hold what they protect.
        """
        whole = self.whole
        for setting in self.settings:
            whole = put(whole, setting.way, setting.item(values[setting.place]))
        return build(whole)

    def shown(self, values: Values) -> dict[str, Any]:
        """Return the values as a policy file would hold them, by place."""
        return {setting.place: setting.item(values[setting.place]).plain for setting in self.settings}

    def base_values(self) -> dict[str, int | float] | None:
        """Return the values with which the policy is the base; None where one of them is not in the space."""
        found = {}
        for setting in self.settings:
            alike = [value for value in setting.like(self.base) if self._is_base(setting, value)]
            if not alike:
                return None
            found[setting.place] = alike[0]
        return found

    def _is_base(self, setting: Setting, value: int | float) -> bool:
        try:
            return build(put(self.whole, setting.way, setting.item(value))) == self.base
        except PolicyFileError:
            return False
