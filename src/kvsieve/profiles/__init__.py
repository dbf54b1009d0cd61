"""Profiles: what `kvsieve calibrate` found out about one model, as one small JSON file.

A profile gives methods their parameters for that model (``plan("fastkv", profile="profile.json")``) and holds the
arrays some methods need: retrieval scores of heads, filters. Profiles of some models are shipped, by name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from kvsieve.errors import KvsieveWarning, PlanError, short

FORMAT = 1

Heads = tuple[tuple[float, ...], ...]
Filters = tuple[tuple[tuple[float, ...], ...], ...]

_HOW = "`kvsieve calibrate MODEL --out profile.json`"


@dataclass(frozen=True)
class Fingerprint:
    """The shape of a model, which tells whether a profile fits it. `name` is for messages and is not compared."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    name: str = field(default="", compare=False)

    @classmethod
    def of(cls, model: Any, name: str = "") -> Fingerprint:
        """That of a model of transformers, from its config. name: by default that of its checkpoint."""
        return cls.of_config(model.config, name)

    @classmethod
    def of_config(cls, config: Any, name: str = "") -> Fingerprint:
        """That of the models with this config of transformers."""
        config = config.get_text_config(decoder=True)

        def of(name: str) -> int:
            # Where layers differ, transformers refuses to tell one number.
            with contextlib.suppress(RuntimeError):
                return getattr(config, name, None) or 0
            return 0

        heads, width = of("num_attention_heads"), of("hidden_size")
        return cls(
            model_type=config.model_type,
            layers=of("num_hidden_layers"),
            query_heads=heads,
            kv_heads=of("num_key_value_heads") or heads,
            head_dim=of("head_dim") or width // max(heads, 1),
            hidden_size=width,
            vocab_size=of("vocab_size"),
            name=name or Path(str(getattr(config, "_name_or_path", "") or "")).name,
        )

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields that differ."""
        names = [each.name for each in fields(self) if each.compare]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def digest(self) -> str:
        """12 hex digits that models of one shape share."""
        shape = [getattr(self, each.name) for each in fields(self) if each.compare]
        return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        shape = (
            f"{self.model_type}, {self.layers} layers, {self.query_heads} query and {self.kv_heads} KV heads of "
            f"{self.head_dim}, {self.hidden_size} channels, {self.vocab_size} tokens"
        )
        return f"{self.name or 'a model'} ({shape})"


@dataclass(frozen=True)
class Profile:
    """What calibration found out about one model.

    fingerprint: the model. parameters: method -> parameter -> value, defaults of `plan(method, profile=...)`.
    heads: [layers][KV heads] retrieval scores in [0, 1], 0 for a head that fetches nothing from far back.
    q_filters: [layers][KV heads][D], unit vectors. Both are None where that part was not calibrated.
    measured: part -> the numbers behind it. text: what was read. environment: where.
    """

    fingerprint: Fingerprint
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heads: Heads | None = None
    q_filters: Filters | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fingerprint.name

    def for_method(self, method: str) -> dict[str, Any]:
        """Parameters of the method of this name. Raises PlanError when the profile holds none for it."""
        if method not in self.parameters:
            holds = ", ".join(self.parameters) or "none"
            raise PlanError(
                f"the profile of {self.name or 'the model'} holds no parameters for {method} (it does for {holds}); "
                f"leave profile= out, or make one with more parts: {_HOW}"
            )
        return dict(self.parameters[method])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it back."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        parts["fingerprint"] = asdict(self.fingerprint)
        return {"format": FORMAT, **{name: part for name, part in parts.items() if part is not None}}

    @classmethod
    def from_dict(cls, data: Any, where: str = "the profile") -> Profile:
        """The inverse of `to_dict`. Raises PlanError for something else; `where` names it."""
        if not isinstance(data, dict) or "format" not in data:
            raise PlanError(f"{where} is not a profile of kvsieve: it has no format; make one with {_HOW}")
        if data["format"] != FORMAT:
            raise PlanError(
                f"{where} has format {data['format']!r}, this version of kvsieve reads format {FORMAT}; make it anew "
                f"with {_HOW}"
            )
        try:
            parts = {each.name: data[each.name] for each in fields(cls) if each.name in data}
            parts["fingerprint"] = Fingerprint(**parts["fingerprint"])
            shape = parts["fingerprint"]
            for name in ("parameters", "measured", "text", "environment"):
                if not isinstance(parts.get(name, {}), dict):
                    raise TypeError(f"{name} is not an object")
            if not all(isinstance(each, dict) for each in parts.get("parameters", {}).values()):
                raise TypeError("parameters are not objects")
            for name, depth in (("heads", 2), ("q_filters", 3)):
                if parts.get(name) is not None:
                    parts[name] = numbers(parts[name], depth)
                    if len(parts[name]) != shape.layers:
                        raise ValueError(f"{name} has {len(parts[name])} layers of {shape.layers}")
        except (KeyError, TypeError, ValueError) as error:
            cause = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"{where} is damaged ({cause}); make it anew with {_HOW}") from error
        return cls(**parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file appears whole or not at all. Raises OSError."""
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        part.write_text(_json(self.to_dict()) + "\n", encoding="utf-8")
        part.replace(target)


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with kvsieve."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_profile(source: Profile | str | os.PathLike[str]) -> Profile:
    """A profile from its file, by the name of one that is shipped, or as it is. Raises PlanError."""
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
            f"({', '.join(shipped_profiles()) or 'none is'}); make one with {_HOW}"
        ) from error
    return _parsed(text, f"the profile {str(source)!r}")


def profiles_dir() -> Path:
    """Directory of the user's own profiles, in which `attach` looks; it need not exist yet.

    ``$KVSIEVE_HOME/profiles``, else ``$XDG_DATA_HOME/kvsieve/profiles``, else ``~/.local/share/kvsieve/profiles``. An
    empty variable counts as unset, and so does a relative ``XDG_DATA_HOME``.
    """
    if own := os.environ.get("KVSIEVE_HOME"):
        return Path(own).expanduser().absolute() / "profiles"
    xdg = os.environ.get("XDG_DATA_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".local" / "share") / "kvsieve" / "profiles"


def own_profile(model: Fingerprint) -> Path:
    """The file in `profiles_dir` in which a model's profile is kept, one for each name and shape."""
    return profiles_dir() / f"{_plain_name(model)}-{model.digest}.json"


def _plain_name(model: Fingerprint) -> str:
    """A checkpoint's own name, without its owner or folder, as a file may be called."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(model.name).name.lower()).strip("-.") or "model"


def keep_profile(profile: Profile) -> Path:
    """Save a profile where `attach` finds it, in place of an earlier one of this model; its file. Raises OSError."""
    file = own_profile(profile.fingerprint)
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.save(file)
    return file


def profiles_of(model: Fingerprint) -> Iterator[tuple[str, Profile]]:
    """Profiles of models of this shape, and what to call each: the user's own, then those that are shipped.

    Of the user's own, one of the model's name comes first, then those saved last. A file that cannot be read is left
    out with a KvsieveWarning.
    """
    found, files = [], []
    # Whoever has no home, or one that cannot be read, has no profiles there.
    with contextlib.suppress(RuntimeError, OSError):
        files = list(profiles_dir().glob(f"*-{model.digest}.json"))
    for file in files:
        try:
            profile = _parsed(file.read_text(encoding="utf-8"), f"the profile {str(file)!r}")
            another = _plain_name(profile.fingerprint) != _plain_name(model)
            found.append((another, -file.stat().st_mtime, file.name, profile))
        except (OSError, UnicodeDecodeError, PlanError) as error:
            warnings.warn(f"a profile of this model is left out: {error}", KvsieveWarning, stacklevel=2)
    for *_, name, profile in sorted(found, key=lambda each: each[:3]):
        if profile.fingerprint == model:
            yield f"your profile {name}", profile
    for name in shipped_profiles():
        if _shipped(name).fingerprint == model:
            yield f"the shipped profile {name}", _shipped(name)


def array_of(part: str, method: str, source: Profile | str | os.PathLike[str] | None) -> tuple[Any, Fingerprint | None]:
    """The array a method takes from a profile, "heads" or "q_filters", and the profile's model; () and None without.

    Raises PlanError for a profile that does not hold it.
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
    text = (resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8")
    return _parsed(text, f"the shipped profile {name!r}")


def _parsed(text: str, where: str) -> Profile:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{where} is damaged (not JSON: {error}); make it anew with {_HOW}") from error
    return Profile.from_dict(data, where)


def numbers(nested: Any, depth: int) -> Any:
    """Lists in lists of finite numbers as tuples of floats, `depth` levels deep. Raises ValueError or TypeError."""
    if depth == 0:
        if isinstance(nested, bool) or not isinstance(nested, (int, float)) or not abs(nested) < float("inf"):
            raise ValueError(f"{nested!r} is not a number")
        return float(nested)
    if isinstance(nested, str) or not isinstance(nested, Sequence):
        raise TypeError(f"{nested!r} is not a list")
    return tuple(numbers(each, depth - 1) for each in nested)


def _json(value: Any, indent: str = "") -> str:
    """JSON with lists of numbers, and objects in lists, on one line each."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{json.dumps(str(name))}: {_json(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in value):
        return "[\n" + ",\n".join(inner + _json(each, inner) for each in value) + f"\n{indent}]"
    if isinstance(value, (list, tuple)) and any(isinstance(each, Mapping) for each in value):
        return "[\n" + ",\n".join(inner + json.dumps(each, allow_nan=False) for each in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


__all__ = [
    "FORMAT",
    "Filters",
    "Fingerprint",
    "Heads",
    "Profile",
    "keep_profile",
    "load_profile",
    "numbers",
    "profiles_dir",
    "shipped_profiles",
]
