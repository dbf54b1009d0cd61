"""Profiles: the parameters and arrays that `kvsieve calibrate` found for one model, as one small JSON file.

A profile gives methods their parameters for that model (``plan("fastkv", profile="profile.json")``) and the arrays that
some methods need: retrieval scores of heads, filters. Profiles of some models are shipped, by name.
"""

from kvsieve.planning.profiles.files import (
    array_of,
    keep_profile,
    load_profile,
    profiles_dir,
    profiles_of,
    shipped_profiles,
)
from kvsieve.planning.profiles.fingerprint import Fingerprint
from kvsieve.planning.profiles.profile import ARRAYS, Filters, Heads, Profile, numbers

__all__ = [
    "ARRAYS",
    "Filters",
    "Fingerprint",
    "Heads",
    "Profile",
    "array_of",
    "keep_profile",
    "load_profile",
    "numbers",
    "profiles_dir",
    "profiles_of",
    "shipped_profiles",
]
