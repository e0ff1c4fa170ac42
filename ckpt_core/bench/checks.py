"""What the settings of all suites are held to, when they are made."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_core.errors import ConfigError

_LEAST_LEAF_BYTES = 8192


def check_leasts(settings: object, leasts: Mapping[str, int]) -> None:
    """Raise ConfigError when one of these fields is below its least value."""
    for name, least in leasts.items():
        if getattr(settings, name) < least:
            raise ConfigError(f"{name}={getattr(settings, name)} must be at least {least}")


def check_numbers(settings: object, *names: str) -> None:
    """Raise ConfigError when one of these fields has no numbers, or one below 1."""
    for name in names:
        values: tuple[int, ...] = getattr(settings, name)
        if not values or min(values) < 1:
            raise ConfigError(f"{name}={values} must be numbers of at least 1")


def check_bound(value: float) -> None:
    """Raise ConfigError when this bound on the overhead is no part of 1."""
    if not 0 < value <= 1:
        raise ConfigError(f"max_overhead={value} must be above 0 and at most 1, such as 0.05")


def check_state(*, state_bytes: int, leaves: int) -> None:
    """Raise ConfigError when a state of this size cannot have so many leaves."""
    least = leaves * _LEAST_LEAF_BYTES
    if state_bytes < least:
        raise ConfigError(
            f"state_bytes={state_bytes} is too small for {leaves} leaves: "
            f"use at least {least} bytes, or fewer leaves"
        )
