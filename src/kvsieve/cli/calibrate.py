"""`kvsieve calibrate`: measure the parameters that a model's methods need, into a profile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.evaluate import names_of
from kvsieve.cli.loading import (
    DeviceOption,
    DtypeOption,
    WeightsOption,
    check_device,
    check_least,
    check_loading,
    check_model_name,
    load_model,
    refuse_text,
)
from kvsieve.cli.options import (
    MEASUREMENT,
    OUTPUT,
    TASKS,
    GeneratedSeedOption,
    ModelArgument,
    expanded,
    option,
    refuse_option,
)
from kvsieve.cli.output import JsonOption, check_writable, emit_json, print_table, progress_bar, saved, say, show
from kvsieve.cli.specs import run_line
from kvsieve.errors import InputError
from kvsieve.lab.calibrate.options import Options
from kvsieve.planning.quantities import format_seconds, parse_lengths

if TYPE_CHECKING:
    from kvsieve.planning.profiles import Profile

_PARTS = "pooling,answers,tsp,asl,heads,q_filters"
# Parts that an option is for.
_PARTS_OF = {
    "budget": ("pooling",),
    "tsp_rate": ("tsp", "asl"),
    "rule": ("tsp",),
    "tolerance": ("tsp",),
    "max_layer": ("tsp", "asl"),
}


def calibrate_command(
    context: typer.Context,
    model: ModelArgument = None,
    text: Annotated[
        Path | None, option(TASKS, "Text file to calibrate on (default: generated prompts with facts to find)")
    ] = None,
    lengths: Annotated[
        str | None, option(TASKS, "Prompt lengths in tokens: 1024,4k (default: 2048; 1024 with --quick)")
    ] = None,
    prompts: Annotated[int | None, option(TASKS, "Prompts per length (default: 4; 2 with --quick)")] = None,
    seed: GeneratedSeedOption = 0,
    parts: Annotated[str, option(MEASUREMENT, "Parts to measure")] = _PARTS,
    quick: Annotated[
        bool, option(MEASUREMENT, "Two prompts of 1024 tokens, fewer settings and layers", "--quick")
    ] = False,
    budget: Annotated[str, option(MEASUREMENT, "Budget at which windows and kernels are compared")] = "20%",
    tsp_rate: Annotated[str, option(MEASUREMENT, "Share of tokens propagated where layers are compared")] = "20%",
    rule: Annotated[
        str, option(MEASUREMENT, "Choice of the TSP layer: settled, or argmin (FastKV's eq. 3)")
    ] = "settled",
    tolerance: Annotated[
        float | None,
        option(MEASUREMENT, "Largest distance, a share of the squared norm (default: 0.05 for settled, 0 for argmin)"),
    ] = None,
    max_layer: Annotated[
        int | None, option(MEASUREMENT, "Deepest TSP layer to consider (default: the last but one)")
    ] = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None,
        option(
            OUTPUT, "Profile to write, replacing an old one (default: where kvsieve looks for it)", callback=expanded
        ),
    ] = None,
    plot: Annotated[
        Path | None, option(OUTPUT, "PNG file: distances of all layers (default: none)", callback=expanded)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Calibrate a model: TSP layer, window, kernel, ASL's threshold, retrieval heads and Q-Filters."""
    refuse_text(model, "--text")
    check_loading(dtype, device)
    wanted = parse_lengths(lengths or ("1024" if quick else "2048"), "--lengths")
    check_least(1, prompts=prompts)
    read = None if text is None else _text(text)
    # A file that cannot be written should fail before minutes of work.
    check_writable("--out", out)
    check_writable("--plot", plot)
    check_model_name(model, weights)
    options = (Options.quick if quick else Options)(
        parts=tuple(names_of(parts)),
        budget=budget,
        tsp_rate=tsp_rate,
        rule=rule,
        tolerance=tolerance,
        max_layer=max_layer,
    )
    _check_used(context, options.parts)
    if plot is not None:
        _check_picture(options.parts)

    from kvsieve.lab.calibrate import Material, calibrate
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.planning.profiles import ARRAYS, keep_profile

    count = (2 if quick else 4) if prompts is None else prompts
    if out is None:
        _make_profiles_dir()
    material = Material(read, "" if text is None else text.name, wanted, count, seed)
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device, weights)

    with progress_bar() as progress:
        profile = calibrate(
            loaded,
            tokenizer,
            material,
            name=MODEL_NAME if model is None else _name_of(model),
            options=options,
            progress=progress,
            announce=partial(announce, quick),
        )
    if out is None:
        file = keep_profile(profile)
    else:
        file = out
        profile.save(file)
    drawn = True
    if plot is not None and "tsp" in profile.measured:
        from kvsieve.lab.calibrate.plot import distances_png

        drawn = saved("--plot", plot, distances_png(profile))
    if as_json:
        emit_json({name: value for name, value in profile.to_dict().items() if name not in ARRAYS} | {"out": str(file)})
    else:
        print_profile(profile)
        _print_use(profile, file, out is None, (model, {"dtype": dtype, "weights": weights, "device": device}))
    if not drawn:
        raise typer.Exit(1)


def _print_use(profile: Profile, file: Path, found: bool, given: tuple[str | None, dict[str, str | None]]) -> None:
    """Print how to use the profile. found: kvsieve finds it without a path. given: model, and how it was loaded."""
    method, (model, loading) = method_of(profile), given
    if found:
        show(f"the profile is in {file}; methods take their parameters from it whenever they run on this model")
    elif method is None:
        show(f"the profile is in {file}")
    else:
        show(f"the profile is in {file}: kvsieve.plan({method!r}, profile={str(file)!r}), or")
        show(f"    {run_line(model, {'method': method, 'profile': file, **loading})}")


def _name_of(model: str) -> str:
    """Return a hub id unchanged, or the last part of a path, since profiles may be published."""
    return Path(model).name if Path(os.path.expanduser(model)).exists() else model


def announce(quick: bool, seconds: float) -> None:
    shorter = "" if quick or seconds < 300 else "; --quick takes a fraction of it"
    say(f"this takes about {format_seconds(seconds)}{shorter}")


def method_of(profile: Profile) -> str | None:
    arrays = {
        "duoattention": profile.heads,
        "qfilters": profile.q_filters,
        "triattention": profile.q_centres,
        "lukv": profile.head_budgets,
        "uncomp": profile.entropies,
    }
    known = [*profile.parameters, *(name for name, measured in arrays.items() if measured)]
    return next((name for name in ("fastkv", "snapkv", *known) if name in known), None)


def print_profile(profile: Profile) -> None:
    print_table(["part", "found", "by"], [list(row) for row in _rows(profile.measured)], left=3)
    for part, reason in profile.measured.get("left_out", {}).items():
        show(f"note: {part} was left out: {reason}")
    if not profile.measured.get("tsp", {}).get("settled", True):
        show("note: no layer is near enough to full context; the nearest was taken")


def _rows(measured: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    if "pooling" in measured:
        one = measured["pooling"]
        found = f"window {one['window']}, kernel {one['kernel']}, {one['pooling']}"
        kls = [point["kl"] for point in one["grid"]]
        rows.append(("pooling", found, f"KL {one['kl']:.3g} at {one['budget']} (worst setting {max(kls):.3g})"))
    if "answers" in measured:
        tested = measured["answers"]["budgets"]
        for task in dict.fromkeys(prompt["task"] for prompt in measured["answers"]["prompts"]):
            rows.append(
                _answers(task, [prompt for prompt in measured["answers"]["prompts"] if prompt["task"] == task], tested)
            )
    if "tsp" in measured:
        one = measured["tsp"]
        at = one["layers"].index(one["layer"])
        by = f"distance {one['relative'][at]:.3g} of the norm, KL {one['kl'][at]:.3g} at {one['rate']}, {one['rule']}"
        rows.append(("tsp", f"layer {one['layer']} of {one['layers'][0]}..{one['layers'][-1]}", by))
    if "asl" in measured:
        one = measured["asl"]
        never = sum(layer is None for layer in one["selects_at"])
        where = sorted({layer for layer in one["selects_at"] if layer is not None})
        by = f"selects at {', '.join(map(str, where)) or 'none'}" + (f", never on {never} prompts" if never else "")
        rows.append(
            ("asl", f"first {one['first']}, tau {one['tau']:g}", by if one["adapts"] else f"{by}: a fixed layer")
        )
    if "heads" in measured:
        one = measured["heads"]
        rows.append(("heads", f"highest score {one['highest']:.2f}", f"median {one['median']:.3f}"))
    if "q_filters" in measured:
        one = measured["q_filters"]
        rows.append(("q_filters", f"rank correlation {one['correlation']:.2f}", f"negative in {one['negative']} heads"))
    if "q_centres" in measured:
        rows.append(("q_centres", f"means of {measured['q_centres']['queries']} queries", "positions rotated back"))
    if "head_budgets" in measured:
        one = measured["head_budgets"]
        rows.append(("head_budgets", f"shares {one['least']:.2f} to {one['largest']:.2f}", f"at {one['budget']}"))
    if "entropies" in measured:
        one = measured["entropies"]
        rows.append(("entropies", f"highest {one['highest']:.3f}", f"lowest {one['lowest']:.3f}"))
    if "anchors" in measured:
        one = measured["anchors"]
        least = min(one["similarity"])
        rows.append(("anchors", f"layers {', '.join(map(str, one['layers']))}", f"least similarity {least:.2f}"))
    return rows


def _answers(task: str, found: list[Mapping[str, Any]], tested: list[str]) -> tuple[str, str, str]:
    least = [prompt["from"] for prompt in found]
    if None in least:
        share = min((list(prompt["same"].values())[-1] for prompt in found if prompt["same"]), default=0.0)
        where = f"{share:.0%} of its tokens right at {tested[-1]}"
    else:
        where = f"right from {max(least, key=tested.index)} on"
    tokens = max(prompt["tokens"] for prompt in found)
    return "answers", f"{task}: {where}", f"up to {tokens} tokens as under full KV, SnapKV as above"


def _check_used(context: typer.Context, parts: Sequence[str]) -> None:
    """Raise InputError for an option of parts that are not measured, or of prompts that are not generated."""
    for name, measured in _PARTS_OF.items():
        if not {*measured} & {*parts}:
            refuse_option(context, name, f"only for the part {' or '.join(measured)}, which --parts leaves out")
    if context.params["text"] is not None:
        refuse_option(context, "seed", "of generated prompts, not with --text")


def _check_picture(parts: Sequence[str]) -> None:
    """Raise InputError if --plot has nothing to draw, KvsieveError without matplotlib."""
    from kvsieve.report.plot_style import require_matplotlib

    require_matplotlib()
    if "tsp" not in parts:
        raise InputError("--plot draws the distances of the part tsp, which --parts leaves out; add it")


def _make_profiles_dir() -> None:
    """Raise InputError for a directory that cannot be written to, before minutes of work."""
    from kvsieve.planning.profiles import profiles_dir

    folder = profiles_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to the profiles' directory {str(folder)!r} ({error.strerror}); name a file with --out, or "
            "set KVSIEVE_HOME to a directory that can be written to"
        ) from error


def _text(path: Path) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"cannot read the text {str(path)!r}: {why}") from error
