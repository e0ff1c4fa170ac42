"""The version, in its only place: packaging and the command line read it from here."""

from __future__ import annotations

__version__ = "0.1.0"
