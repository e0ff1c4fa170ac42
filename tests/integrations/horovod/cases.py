"""The trainings whose bits are compared: arguments of `Recipe`, and what is known of each.

Facts of a case: "splits" says whether steps may be made in parts; "reduces" whether layers become final one
after the other inside step().
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt_core.options.presets import PRESETS


@dataclass(frozen=True)
class Case:
    """One training, and how its steps may be made."""

    recipe: dict[str, Any] = field(default_factory=dict)
    splits: bool = True
    reduces: bool = True


def _case(optimizer: str, **options: Any) -> Case:
    return Case({"optimizer": optimizer, "options": options})


def _horovod(**horovod: Any) -> Case:
    return Case({"horovod": horovod})


def _forms() -> dict[str, Case]:
    forms = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    return {
        f"{name}-{form}": _case(name, **options)
        for name in ("SGD", "Adam", "AdamW")
        for form, options in forms.items()
    }


def _plain_optimizers() -> dict[str, Case]:
    names = "RMSprop Adagrad Adadelta NAdam RAdam Adamax ASGD Rprop Adafactor"
    return {name: _case(name) for name in names.split()}


def _own(*names: str, splits: bool) -> dict[str, Case]:
    return {name: Case({"optimizer": name}, splits=splits) for name in names}


CASES: dict[str, Case] = {
    **_forms(),
    **_plain_optimizers(),
    "momentum": _case("SGD", momentum=0.9),
    "nesterov": _case("SGD", momentum=0.9, nesterov=True, dampening=0.0),
    "momentum-fused": _case("SGD", momentum=0.9, fused=True),
    "amsgrad": _case("Adam", amsgrad=True),
    "RMSprop-centered": _case("RMSprop", centered=True, momentum=0.9),
    "passes": Case({"horovod": {"backward_passes_per_step": 2}, "loop": "passes"}),
    "groups": _horovod(groups=2),
    "groups-lists": _horovod(groups="lists"),
    "fp16": _horovod(compression="fp16"),
    "sum": _horovod(op="Sum"),
    "predivide": _horovod(gradient_predivide_factor=2.0),
    "sparse": Case({"optimizer": "SGD", "options": {"weight_decay": 0.0}, "sparse": True}),
    "sparse-as-dense": Case(
        {
            "optimizer": "SGD",
            "options": {"weight_decay": 0.0},
            "sparse": True,
            "horovod": {"sparse_as_dense": True},
        }
    ),
    "process-set": Case({"ranks": [0, 1]}),
    "clip": Case({"loop": "clip"}, reduces=False),
    "scaler": Case({"loop": "scaler"}, reduces=False),
    "scaler-inf": Case({"loop": "scaler_inf"}, reduces=False),
    "by-hand": Case({"loop": "by_hand"}),
    "refrozen": Case({"loop": "refrozen"}),
    "step-hooks": Case({"loop": "hooked"}, splits=False),
    "closure": Case(
        {
            "optimizer": "LBFGS",
            "options": {"lr": 0.1, "max_iter": 3, "tolerance_change": 0.0, "tolerance_grad": 0.0},
            "loop": "closure",
        },
        splits=False,
    ),
    **_own("PlainOwn", "NestedState", "ToyLamb", splits=True),
    **_own("GlobalNorm", "GroupCounter", "SelfCounter", "RandomDraws", "ClippingSGD", splits=False),
}

OF_THREE = ("AdamW-foreach", "passes", "groups", "sparse", "process-set")
"""Run on three ranks as well: how gradients come together; optimizers know nothing of ranks."""

MODES = ("in_step", "lazy")
TORN_MOST_S = 0.04


@dataclass(frozen=True)
class Saved:
    """Arguments of `jobs_saved.consistent`, root aside; `how` is for `Way`, mode, delays."""

    recipe: dict[str, Any]
    how: dict[str, Any]


def _delayed(seed: int, **recipe: Any) -> dict[str, Any]:
    return {"sleep_s": 0.003, "seed": seed, **recipe}


DELAYED: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "SGD", "options": {"momentum": 0.9}},
    "AdamW": {"optimizer": "AdamW", "options": {"foreach": True}},
    "amsgrad-fused": {"optimizer": "Adam", "options": {"amsgrad": True, "fused": True}},
    "Adafactor": {"optimizer": "Adafactor"},
    "NestedState": {"optimizer": "NestedState"},
}


def delayed(*names: str, seed: int) -> dict[str, Saved]:
    """These optimizers, in both modes; odd seeds save every second step."""
    return {
        f"{name}-{mode}-{seed}": Saved(
            _delayed(seed, **DELAYED[name]), {"mode": mode, "every": 1 + seed % 2}
        )
        for name in names
        for mode in MODES
    }


DELAYED_BY_TWO = delayed(*DELAYED, seed=0) | delayed("momentum", "AdamW", seed=1)
DELAYED_BY_THREE = delayed("amsgrad-fused", "Adafactor", seed=2)


def all_lazy() -> dict[str, Saved]:
    """Nothing but buffers is copied inside a save: step counters are left to later, too."""
    how = {"every": 1, "options": {"eager_leaf_bytes": 0}}
    return {
        f"all-lazy-{name}-{mode}": Saved(_delayed(4, **DELAYED[name]), {"mode": mode, **how})
        for name in ("AdamW", "Adafactor")
        for mode in MODES
    }


def torn() -> dict[str, Saved]:
    """The negative control."""
    return {
        f"torn-{mode}": Saved(
            _delayed(0, **DELAYED["AdamW"]),
            {"mode": mode, "every": 2, "barrier": False, "most_s": TORN_MOST_S},
        )
        for mode in MODES
    }


def _ways(**how: Any) -> dict[str, Saved]:
    recipe = _delayed(3, **how.pop("recipe", {}))
    return {mode: Saved(recipe, {"mode": mode, **how}) for mode in MODES}


def _named(prefix: str, **how: Any) -> dict[str, Saved]:
    return {f"{prefix}-{mode}": saved for mode, saved in _ways(**how).items()}


EDITS: dict[str, Saved] = {
    **_named("clamp", edit="clamp"),
    **_named("clamp-block", edit="clamp", end="block", every=2),
    **_named("moments", edit="state"),
    **_named("second", edit="second"),
    **_named("frozen", edit="frozen"),
    **_named("ema", edit="ema", end="block"),
    **_named("ema-implicit", edit="ema", end="itself"),
    **_named("twice", recipe={"loop": "twice"}, end="block"),
    **_named("skipped", recipe={"loop": "scaler_inf"}, end="block"),
}
"""What is done after step(), before the iteration ends."""

ENDS: dict[str, Saved] = {
    **_named("call", end="call"),
    **_named("block", end="block"),
    **_named("zero_grad", end="itself"),
    **_named("forward", end="itself", recipe={"loop": "forward_first"}),
    **_named("step", end="itself", recipe={"loop": "step_alone"}, attach=False),
}
"""How iterations end."""

STRATEGIES: dict[str, Saved] = {
    f"{name}-{mode}": Saved(
        _delayed(5),
        {
            "mode": mode,
            "most_s": 0.001,
            "options": {**PRESETS[name].fields, "staging_bytes": "4MiB", "blocking": True},
        },
    )
    for name, mode in (("checkfreq", "in_step"), ("gpm", "lazy"))
}
"""Presets that block: in two phases layer by layer, and into a mapped file at the end."""

FAILURES = {
    f"{on_error}-{ends}-{mode}": {
        "mode": mode,
        "on_error": on_error,
        "code": code,
        "ends": ends,
        "operation": operation,
    }
    for mode in MODES
    for on_error, code, ends, operation in (
        ("raise", "ENOSPC", "call", "pwrite"),
        ("raise", "EIO", "zero_grad", "sync"),
        ("raise", "EIO", "step", "sync"),
        ("warn", "ENOSPC", "call", ""),
    )
}
"""Arguments of `jobs_failures.failing`."""

BLOCKING = {
    "in_step": {"on_error": "raise", "code": "EIO", "ends": "zero_grad", "operation": "sync"},
    "lazy": {"on_error": "warn", "code": "ENOSPC", "ends": "call", "operation": "pwrite"},
}
"""The same with `blocking`, by the mode of layers."""
