"""`Bound`: what stands in a model for the time of a session."""

from __future__ import annotations

from typing import NoReturn

from kvpolicy.errors import UnsupportedModelError


class Bound:
    """It cannot be copied with the model, whose copy would go on in a session of another one."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UnsupportedModelError("this model is in a session of kvpolicy: copy it outside of the `with` block")

    def __reduce__(self) -> NoReturn:
        raise UnsupportedModelError("this model is in a session of kvpolicy: pickle it outside of the `with` block")
