"""What is closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Base of whatever owns processes or threads of a run."""

    @abstractmethod
    def close(self) -> None:
        """End all that it owns; idempotent."""

    def break_off(self) -> None:
        """As `close`, after an error in the `with` block."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.break_off() if error else self.close()
