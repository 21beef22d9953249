"""A Mechanic that passes for the optimizer inside it, so that a script's own checks hold."""

from __future__ import annotations

from typing import Any

from mechanic.torch import Mechanic


class Disguised(Mechanic[Any]):
    """``isinstance(optimizer, AdamW)`` is true of a Mechanic around AdamW, and it has the methods of its base.

    Made by assigning ``__class__`` to a Mechanic: torch puts hooks around the ``step`` of the class that it finds when
    an optimizer is built.
    """

    __class__ = property(lambda self: type(self.base))

    def __getattr__(self, name: str) -> Any:
        # Private names are not passed on: by one of them GradScaler would let a fused base skip steps by itself.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_of_base = not name.startswith("_") and name in vars(self.base) and not hasattr(Mechanic, name)
        if is_of_base:
            setattr(self.base, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle refuses an object that gives another class than its own, and copies are not watched.
        return _restored, (self.__getstate__(),)


Disguised.__name__ = Disguised.__qualname__ = "Mechanic"  # what a script prints


def _restored(state: dict[str, Any]) -> Mechanic[Any]:
    optimizer = Mechanic.__new__(Mechanic)
    optimizer.__setstate__(state)
    optimizer.__class__ = Disguised
    return optimizer
