"""The engine's log is no news while faults are injected."""

from tests.crash.promises import quietly

__all__ = ["quietly"]
