"""Read by every process of a run as it starts: frameworks are imported in half of the time.

A run starts hundreds of processes that import torch, and most of what they do is to import.

- A sixth of that time is Python's search for garbage among what was imported so far. There is none, and it
  is never looked at again.
- The first optimizer imports torch's compiler, which takes as long as torch itself, only to leave what is
  compiled. Where nothing is, there is nothing to leave: the compiler is imported by the first that asks more
  of it, such as `torch.compile`.
- Whoever asks torch to be deterministic imports the compiler's settings, and with them the compiler. Here
  they are told once they are imported.
- DeepSpeed asks it to compile a function of one of its optimizers, wherever an engine is made. Here it is
  asked when that function is called.
- A quarter of torch is how tensors without bytes, on "meta" or faked, are computed: it is imported by the
  first that has such, or asks for a part of it.
- Lightning imports the compiler to know whether it has a module that was compiled: asking that needs none.
- Lightning imports torchmetrics, which imports whatever its metrics of sound, text and plots would need.

With `CKPT_PLACES=all`, which tries everything, nothing is left for later and nothing out.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

FRAMEWORKS = ("torch", "lightning", "deepspeed", "horovod")
COMPILER = "torch._dynamo"
APART = "torch._dynamo._trace_wrapped_higher_order_op"
"""Transformers' masks are made with it, compiled or not."""
MARKS = ("allow_in_graph", "assume_constant_result")
"""What returns the function that it is given, for the compiler alone to know."""
SETTINGS = "torch._inductor.config"
METRICS = "torchmetrics"
META = "torch._meta_registrations"
CONTEXT = "torch.utils._device"
"""What `with torch.device("meta")` makes."""
MUON = "deepspeed.runtime.zero.muon.original_muon"
LATER = (COMPILER, "torch._inductor.compile_fx")
"""Imported in the middle of the work; what is there by then may be garbage."""

NEEDED_BY_METRICS = ("matplotlib", "scipy", "transformers")

_AS_IT_IS = os.environ.get("CKPT_PLACES") == "all"


class _Calm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a framework as Python would, and stands between it and its loader."""

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{COMPILER}.") and name != APART:
            _load(sys.modules[COMPILER])
            if name in sys.modules:
                return _There(sys.modules[name]).spec
        if name not in KNOWN or name in self._loaders:
            return None
        self._loaders[name] = None  # the search below comes here again
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name in _LAZY and not _AS_IT_IS:
            return _LAZY[spec.name](spec.name)
        found: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loaders[module.__name__]
        if isinstance(module, _Later):
            return
        with _around(module):
            _execute(module)


class _There(importlib.abc.Loader):
    """Of a module that came with the one around it, after Python had looked: it would be executed again.

    By the import system's rule its own spec is what counts then, whatever a finder returns.
    """

    def __init__(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        self._module, self.spec, self._loader = module, module.__spec__, module.__spec__.loader
        self.spec.loader = self

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader = self._loader


def _around(module: ModuleType) -> AbstractContextManager[None]:
    return nullcontext() if _AS_IT_IS else _AROUND.get(module.__name__, nullcontext)()


def _execute(module: ModuleType) -> None:
    """What the module's own loader does, without looking for garbage."""
    loader: Any = module.__loader__
    outermost = gc.isenabled()
    gc.disable()
    try:
        loader.exec_module(module)
    finally:
        if outermost:
            if module.__name__ in FRAMEWORKS:
                gc.freeze()
            gc.enable()


# -- what is imported by the first that needs it -------------------------------------------------


class _Later(ModuleType):
    """A module that nobody has asked for anything yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for them as it makes a module
            raise AttributeError(name)
        _load(self)
        return ModuleType.__getattribute__(self, name)


_loading = threading.RLock()
_begun: set[str] = set()


def _load(module: ModuleType) -> None:
    """Import it, once. What it asks of itself meanwhile is not there yet, as in any import."""
    with _loading:
        if isinstance(module, _Later) and module.__name__ not in _begun:
            _begun.add(module.__name__)
            # Order matters: torch has imported it before whatever loads a module here.
            _load(sys.modules.get(META, module))
            with _around(module):
                _execute(module)
            module.__class__ = ModuleType


def _is_there(name: str) -> bool:
    """Whether it was imported, and all of it."""
    return name in sys.modules and not isinstance(sys.modules[name], _Later)


# -- torch's compiler ----------------------------------------------------------------------------


class _Compiler(_Later):
    """The compiler, while nobody has asked for more than not to be compiled."""

    def __getattr__(self, name: str) -> Any:
        if COMPILER not in _begun:
            if name == "graph_break":
                return lambda *_, **__: None
            if name == "disable":
                return functools.partial(_disable, self)
            if name in MARKS:
                return functools.partial(_mark, name)
            if name == "OptimizedModule":
                return _Optimized
            if (
                name == "trace_rules"
            ):  # cleared as ranks meet: what was compiled before knows none of them
                return SimpleNamespace(clear_lru_cache=lambda: None)
        return super().__getattr__(name)


class _AskedOnly(type):
    """Of a class that is only asked what belongs to it."""

    def __instancecheck__(cls, instance: object) -> bool:
        compiler: Any = sys.modules[COMPILER]
        return _is_there(COMPILER) and isinstance(instance, compiler.OptimizedModule)


class _Optimized(metaclass=_AskedOnly):
    """A compiled module, of which there is none as long as there is no compiler."""


_marked: list[tuple[str, Callable[..., Any]]] = []


def _mark(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for the compiler to mark once it is there."""
    _marked.append((name, fn))
    return fn


@contextmanager
def _with_marks() -> Iterator[None]:
    yield
    for name, fn in _marked:
        getattr(sys.modules[COMPILER], name)(fn)


def _disable(
    module: ModuleType, fn: Callable[..., Any] | None = None, recursive: bool = True, **more: Any
) -> Callable[..., Any]:
    """A function that the compiler shall not look into: itself, until there is a compiler."""
    if fn is None:
        return functools.partial(_disable, module, recursive=recursive, **more)
    real: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def called(*args: Any, **named: Any) -> Any:
        if isinstance(module, _Compiler):
            return fn(*args, **named)
        if not real:
            real.append(module.disable(fn, recursive, **more))
        return real[0](*args, **named)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]  # as the compiler marks it
    return called


@contextmanager
def _compiled_later() -> Iterator[None]:
    """What is given to `torch.compile` meanwhile is compiled when it is first called."""
    import torch

    compile_now = torch.compile

    def later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(later, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *args, **named: compiled()(*args, **named))

    torch.compile = later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


# -- tensors without bytes -----------------------------------------------------------------------


@contextmanager
def _meta_as_faked() -> Iterator[None]:
    """Whoever fakes tensors has what computes them; whoever draws by a generator needs it not."""
    yield
    import torch
    from torch._subclasses import fake_tensor

    if hasattr(torch._C, "_set_generator_metaclass") and not _is_there(META):
        torch._C._set_generator_metaclass(
            importlib.import_module("torch._opaque_base").OpaqueBaseMeta
        )
    _first_loads(fake_tensor.FakeTensorMode, lambda *_: True)


@contextmanager
def _meta_as_default() -> Iterator[None]:
    """Whoever makes tensors on "meta" for a while has what computes them."""
    yield
    import torch

    context = sys.modules[CONTEXT].DeviceContext
    _first_loads(context, lambda device: torch.device(device).type == "meta")


def _first_loads(kind: Any, means: Callable[..., bool]) -> None:
    """The first object of a class that is meant imports how tensors without bytes are computed."""
    make = kind.__init__

    @functools.wraps(make)
    def first(self: Any, *args: Any, **named: Any) -> None:
        if means(*args):
            _load(sys.modules[META])
            kind.__init__ = make
        make(self, *args, **named)

    if META in sys.modules and not _is_there(META):
        kind.__init__ = first


# -- torch's settings ----------------------------------------------------------------------------


@contextmanager
def _of_torch() -> Iterator[None]:
    with _meta_as_faked(), _deterministic_without_settings():
        yield


@contextmanager
def _deterministic_without_settings() -> Iterator[None]:
    """`torch.use_deterministic_algorithms` tells the compiler's settings only where there are any."""
    yield
    import torch

    tell_all = torch.use_deterministic_algorithms

    def use(mode: bool, *, warn_only: bool = False) -> None:
        if SETTINGS in sys.modules:
            tell_all(mode, warn_only=warn_only)
        else:
            torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)

    torch.use_deterministic_algorithms = use


@contextmanager
def _settings_told() -> Iterator[None]:
    """What was told before they were imported."""
    yield
    import torch

    settings: Any = sys.modules[SETTINGS]
    if torch.are_deterministic_algorithms_enabled() and hasattr(settings, "deterministic"):
        settings.deterministic = True


# -- packages that are not asked for -------------------------------------------------------------


@contextmanager
def _without_extras() -> Iterator[None]:
    """Let torchmetrics find none of the packages that Lightning needs not, where it asks as we know it."""
    asked = importlib.import_module("lightning_utilities.core.imports")
    names = ("_version", "package_available")
    before: dict[str, Any] = {name: vars(asked)[name] for name in names if name in vars(asked)}

    def version(package: str) -> str:
        if package in NEEDED_BY_METRICS:
            raise importlib.metadata.PackageNotFoundError(package)
        found: str = before["_version"](package)
        return found

    def package_available(package: str) -> bool:
        return package not in NEEDED_BY_METRICS and before["package_available"](package)

    ours = {"_version": version, "package_available": package_available}
    vars(asked).update({name: ours[name] for name in before})
    try:
        yield
    finally:
        vars(asked).update(before)
        asked.module_available.cache_clear()


_AROUND = {
    METRICS: _without_extras,
    MUON: _compiled_later,
    "torch": _of_torch,
    COMPILER: _with_marks,
    CONTEXT: _meta_as_default,
    SETTINGS: _settings_told,
}
_LAZY = {COMPILER: _Compiler, META: _Later}
KNOWN = {*FRAMEWORKS, *LATER, *_AROUND, *_LAZY}

sys.meta_path.insert(0, _Calm())
