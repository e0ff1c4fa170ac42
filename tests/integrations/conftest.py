"""Folders of frameworks that are not installed are left out; `test_installed.py` says so."""

from __future__ import annotations

from tests.integrations.frameworks import FRAMEWORKS, installed

collect_ignore = [name for name in FRAMEWORKS if not installed(name)]
