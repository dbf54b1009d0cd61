"""Lookup of profiles: shipped with kvsieve, in the user's own directory, or in a named file."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError, KvsieveWarning, PlanError, short
from kvsieve.folders import home
from kvsieve.planning.profiles.fingerprint import Fingerprint
from kvsieve.planning.profiles.profile import HOW_TO_MAKE, Profile

_FOLDER = Path(__file__).parent


def shipped_profiles() -> list[str]:
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def load_profile(source: Profile | str | os.PathLike[str]) -> Profile:
    """Return a profile given as a file, the name of a shipped one, or the profile itself. Raises PlanError."""
    if isinstance(source, Profile):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise PlanError(f"profile must be a Profile, a file or the name of one that is shipped, got {short(source)}")
    if source in shipped_profiles():
        return _shipped(str(source))
    path = Path(os.path.expanduser(source))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        text_only = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "not the name of a file"
        why = error.strerror if isinstance(error, OSError) else text_only
        raise PlanError(
            f"cannot read the profile {str(source)!r} ({why}); it is neither a file nor shipped "
            f"({', '.join(shipped_profiles()) or 'none is'}); make one with {HOW_TO_MAKE}"
        ) from error
    return _parsed(text, f"the profile {str(source)!r}")


def profiles_dir() -> Path:
    """Return the directory of the user's own profiles, which `attach` searches; it need not exist.

    ``$KVSIEVE_HOME/profiles``, else ``$XDG_DATA_HOME/kvsieve/profiles``, else ``~/.local/share/kvsieve/profiles``. An
    empty variable counts as unset, and so does a relative ``XDG_DATA_HOME``.

    Raises:
        InputError: none of them is set, and the user has no home directory.
    """
    if own := os.environ.get("KVSIEVE_HOME"):
        return Path(os.path.expanduser(own)).absolute() / "profiles"
    xdg = os.environ.get("XDG_DATA_HOME", "")
    user = home()
    if os.path.isabs(xdg):
        return Path(xdg) / "kvsieve" / "profiles"
    if user is None:
        raise InputError(
            "profiles are kept in the user's home directory, and this user has none (no HOME, no entry in "
            "/etc/passwd); set KVSIEVE_HOME to a directory for them"
        )
    return user / ".local" / "share" / "kvsieve" / "profiles"


def own_profile(model: Fingerprint) -> Path:
    """Return the file in `profiles_dir` for a model's profile, by its name and shape."""
    return profiles_dir() / f"{_plain_name(model)}-{model.digest}.json"


def _plain_name(model: Fingerprint) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", Path(model.name).name.lower()).strip("-.") or "model"


def keep_profile(profile: Profile) -> Path:
    """Save a profile where `attach` finds it, replacing this model's earlier one; return its file. Raises OSError."""
    file = own_profile(profile.fingerprint)
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.save(file)
    return file


def profiles_of(model: Fingerprint) -> Iterator[tuple[str, Profile]]:
    """Yield the profiles of models of this shape with their names: the user's own, then the shipped ones.

    The user's profile with the model's name comes first, then the newest. Unreadable files are skipped with a
    KvsieveWarning.
    """
    found = []
    files = []
    # A user without a readable home has no profiles there.
    with contextlib.suppress(InputError, OSError):
        files = list(profiles_dir().glob(f"*-{model.digest}.json"))
    for file in files:
        try:
            profile = _parsed(file.read_text(encoding="utf-8"), f"the profile {str(file)!r}")
            another = _plain_name(profile.fingerprint) != _plain_name(model)
            found.append((another, -file.stat().st_mtime, file.name, profile))
        except (OSError, UnicodeDecodeError, PlanError) as error:
            warnings.warn(f"a profile of this model is left out: {error}", KvsieveWarning, stacklevel=2)
    for *_, name, profile in sorted(found, key=lambda entry: entry[:3]):
        if profile.fingerprint == model:
            yield f"your profile {name}", profile
    for name in shipped_profiles():
        if _shipped(name).fingerprint == model:
            yield f"the shipped profile {name}", _shipped(name)


def array_of(part: str, method: str, source: Profile | str | os.PathLike[str] | None) -> tuple[Any, Fingerprint | None]:
    """Return an array of a profile, such as "heads" or "q_filters", and the profile's model.

    () and None without a profile. Raises PlanError for a profile without the array.
    """
    if source is None:
        return (), None
    loaded = load_profile(source)
    found = getattr(loaded, part)
    if found is None:
        raise PlanError(
            f"the profile of {loaded.name or 'the model'} holds no {part}, which {method} needs; `kvsieve calibrate "
            f"MODEL --parts {part} --out profile.json` makes one"
        )
    return found, loaded.fingerprint


@functools.cache
def _shipped(name: str) -> Profile:
    return _parsed((_FOLDER / f"{name}.json").read_text(encoding="utf-8"), f"the shipped profile {name!r}")


def _parsed(text: str, where: str) -> Profile:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{where} is damaged (not JSON: {error}); make it anew with {HOW_TO_MAKE}") from error
    return Profile.from_dict(data, where)
