"""Profiles: the parameters and arrays that `kvsieve calibrate` found for one model, as one small JSON file.

A profile gives methods their parameters for that model (``plan("fastkv", profile="profile.json")``) and the arrays that
some methods need: retrieval scores of heads, filters. Profiles of some models are shipped, by name.
"""

from kvsieve.planning.profiles.files import array_of as array_of
from kvsieve.planning.profiles.files import keep_profile as keep_profile
from kvsieve.planning.profiles.files import load_profile as load_profile
from kvsieve.planning.profiles.files import profiles_dir as profiles_dir
from kvsieve.planning.profiles.files import profiles_of as profiles_of
from kvsieve.planning.profiles.files import shipped_profiles as shipped_profiles
from kvsieve.planning.profiles.fingerprint import Fingerprint as Fingerprint
from kvsieve.planning.profiles.profile import ARRAYS as ARRAYS
from kvsieve.planning.profiles.profile import Filters as Filters
from kvsieve.planning.profiles.profile import Heads as Heads
from kvsieve.planning.profiles.profile import Profile as Profile
from kvsieve.planning.profiles.profile import numbers as numbers
