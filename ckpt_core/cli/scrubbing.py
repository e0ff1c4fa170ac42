"""`scrub`: what is damaged in some places of a run, and that it is whole again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_core.anywhere import local, url_of
from ckpt_core.cli.places import check_directory
from ckpt_core.cli.text import note, say, say_json, say_wrong
from ckpt_core.cli.verifying import refuse_unread
from ckpt_core.levels import Away, Scrubbed, places_of, scrub
from ckpt_core.observe import progress_bar
from ckpt_core.options import Level
from ckpt_core.units import count_text, size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import ScrubRequest


def scrub_places(request: ScrubRequest) -> bool:
    """Read, repair and say so; False when anything is left damaged.

    Raises:
        Away, ConfigError: as `scrub`.
        RestoreError: once all is told, nothing is wrong with what this user may read, and that is not all.
    """
    places = _places(request)
    bytes_per_s = Level(places[0], bandwidth=request.bandwidth).bytes_per_s
    found: list[Scrubbed] = []
    away: Away | None = None
    with progress_bar(shown=not request.no_progress, tell=note) as show:
        steps = scrub(places, progress=show, dry_run=request.dry_run, bytes_per_s=bytes_per_s)
        try:
            for one in steps:
                found.append(one)
                if not request.json:
                    _say(one)
        except Away as exc:
            away = exc  # what was read is told first
    if away is not None and not found:
        raise away
    ok = away is None and all(one.ok for one in found)
    if request.json:
        say_json({"places": places, "ok": ok, "steps": [_json(one) for one in found]})
    else:
        _say_sum(found)
    if away is not None:
        raise away
    _check_read(found)
    return ok


def _check_read(found: list[Scrubbed]) -> None:
    unread = [_name(one) for one in found if one.is_refused]
    if unread and all(one.ok or one.is_refused for one in found):
        more = f" and {len(unread) - 1} more" if unread[1:] else ""
        refuse_unread(f"{unread[0]}{more}")


def _places(request: ScrubRequest) -> list[str]:
    places: list[str] = []
    for place in request.places:
        url = url_of(place)
        if url is None:
            check_directory(local(place))
        if url is None and request.levels:
            places += places_of(local(place))
        else:
            places.append(str(local(place)) if url is None else Level(url).url)
    return list(dict.fromkeys(places))


def _name(one: Scrubbed) -> str:
    return f"{one.copy.directory or f'step {one.copy.step}'} of {one.url}"


def _say(one: Scrubbed) -> None:
    name = _name(one)
    checked = f"{size_text(one.checked_bytes)} checked"
    if one.ok and not one.damage:
        say(f"{name}: ok, {checked}")
        return
    state = f"repaired from {one.source}" if one.ok else "DAMAGED" if one.damage else "NOT READ"
    (say if one.ok else say_wrong)(f"{name}: {state}, {checked}")
    for text in one.damage:
        say(f"  {text}")
    if one.left:
        say(f"  not repaired: {one.left}" if one.damage else f"  {one.left}")


def _say_sum(found: list[Scrubbed]) -> None:
    repaired = sum(bool(one.source) for one in found)
    left = sum(not one.ok and not one.is_refused for one in found)
    nbytes = size_text(sum(one.checked_bytes for one in found))
    named = sum(one.copy.directory is not None for one in found)
    what = count_text(len(found) - named, "step")
    what += f" and {count_text(named, 'directory')}" if named else ""
    say(f"{what}, {nbytes}: {repaired} repaired, {left} left damaged")


def _json(one: Scrubbed) -> dict[str, object]:
    return {
        "place": one.url,
        "step": one.copy.step,
        "directory": one.copy.directory,
        "attempt": one.copy.attempt,
        "ok": one.ok,
        "checked_bytes": one.checked_bytes,
        "damage": list(one.damage),
        "source": one.source or None,
        "left": one.left or None,
    }
