"""Finds plugins, asks them what they register, and hands out techniques by kind and name.

Order of loading (fixed, so that names are stable): built-ins, `-p module`, `--plugins-dir` files by
name, then entry points of group `twinfer` by name.

Invariants
* Built-ins register through the same hooks as third parties.
* The first plugin to register a name of a kind owns it; later ones get `plugin/name`.
* A plugin asked for by name that fails to load is an error; an installed one that fails is listed as
  broken with its reason, and any lookup that misses says so.
* A hook that no specification knows (a misspelling) is an error that lists those there are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from pydantic import BaseModel, ValidationError

from twinfer.core import hookspecs
from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError, PluginError, short
from twinfer.core.guard import FAULTS, Blaming, raised
from twinfer.core.mistakes import first_mistake
from twinfer.core.observers import Observers
from twinfer.core.technique import KINDS, Technique

GROUP = "twinfer"
_ALSO = {"cli_command": ("run",), "dashboard_page": ("render",)}
"""What kinds declare that no class inherits."""
OPTION_OF_KIND = {kind: "--" + kind.replace("_", "-") for kind in KINDS} | {"quantizer": "--quant"}


@dataclass(frozen=True, slots=True)
class Registered:
    """A technique class and where it came from."""

    kind: str
    name: str
    cls: type[Any]
    plugin: str
    version: str
    source: str

    @property
    def builtin(self) -> bool:
        return self.source == "built-in"


class Registry:
    """All techniques known to this process."""

    def __init__(
        self,
        modules: Sequence[str] = (),
        plugin_dirs: Sequence[str | Path] = (),
        entry_points: bool = True,
    ) -> None:
        self.recipe = (tuple(modules), tuple(map(str, plugin_dirs)), entry_points)
        """The arguments that make an equal registry, in another process."""
        self._pm = pluggy.PluginManager(GROUP)
        self._pm.add_hookspecs(hookspecs)
        self._found: dict[str, dict[str, Registered]] = {kind: {} for kind in KINDS}
        self.broken: dict[str, str] = {}
        self._observers = Observers(self._pm)
        from twinfer.plugins import BUILTINS

        for module_name in BUILTINS:
            self._load(importlib.import_module(module_name), module_name.rsplit(".", 1)[-1], "", "built-in")
        for module_name in modules:
            self._load_named(module_name)
        for folder in plugin_dirs:
            self._load_dir(Path(folder))
        if entry_points:
            self._load_entry_points()

    @property
    def observers(self) -> Observers | None:
        """Relay of the observation hooks; None when no plugin listens."""
        return self._observers if self._observers.any() else None

    # --- loading --------------------------------------------------------------------------------

    def _load_named(self, module_name: str) -> None:
        try:
            module = importlib.import_module(module_name)
        except FAULTS as error:  # a script that is no plugin may end itself
            raise PluginError(
                f"-p {module_name}: cannot be imported ({raised(error)}); "
                "run from its folder, install it, or give --plugins-dir FOLDER"
            ) from error
        self._load(module, module_name, getattr(module, "__version__", ""), f"module {module_name}")
        if not self._pm.get_hookcallers(module):
            raise PluginError(
                f"-p {module_name}: {getattr(module, '__file__', None) or 'this module'} implements no hook of twinfer; "
                "mark a function such as register_scheduler with @hookimpl"
            )

    def _load_dir(self, folder: Path) -> None:
        if not folder.is_dir():
            raise PluginError(f"--plugins-dir {folder}: no such folder; give a folder with one .py file per plugin")
        for path in sorted(folder.glob("*.py")):
            name = f"twinfer_plugin_{path.stem}"
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise PluginError(f"--plugins-dir {folder}: {path.name} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # dataclasses and pydantic look their module up
            try:
                spec.loader.exec_module(module)
            except FAULTS as error:
                del sys.modules[name]
                raise PluginError(f"--plugins-dir {folder}: {path.name} fails to load ({raised(error)})") from error
            self._load(module, path.stem, getattr(module, "__version__", ""), str(path))

    def _load_entry_points(self) -> None:
        for ep in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
            version = ep.dist.version if ep.dist is not None else ""
            try:
                self._load(ep.load(), ep.name, version, f"entry point {ep.value}")
            except FAULTS as error:  # an installed plugin must not take the tool down with it
                self.broken[ep.name] = raised(error)

    def _load(self, plugin: ModuleType | object, name: str, version: str, source: str) -> None:
        found: list[Registered] = []

        def register_kind(kind: str) -> Any:
            def register(cls: type[Any]) -> None:
                _check_declaration(kind, cls, name)
                found.append(Registered(kind, cls.name, cls, name, version, source))

            return register

        if self._pm.has_plugin(name):
            raise PluginError(f"plugin {name!r} is registered twice; rename one of them")
        try:
            self._pm.register(plugin, name=name)
            self._pm.check_pending()
            for kind in KINDS:
                hook_name = f"register_{kind}"
                for impl in getattr(self._pm.hook, hook_name).get_hookimpls():
                    if impl.plugin is plugin:
                        impl.function(register_kind(kind))
        except FAULTS as error:
            self._pm.unregister(name=name)
            if isinstance(error, PluginError):
                raise
            misspelt = self._misspelt(plugin) if isinstance(error, pluggy.PluginValidationError) else ""
            raise PluginError(f"plugin {name!r} ({source}): {misspelt or raised(error)}") from error
        for item in found:
            names = self._found[item.kind]
            key = item.name if item.name not in names else f"{name}/{item.name}"
            if key in names:
                raise PluginError(f"plugin {name!r} registers {item.kind} {item.name!r} twice")
            names[key] = Registered(item.kind, key, item.cls, item.plugin, item.version, item.source)

    def _misspelt(self, plugin: ModuleType | object) -> str:
        """What `plugin` marks as a hook and is none, or asks a hook for that it does not give, in words; or nothing."""
        known = [name for name in vars(hookspecs) if name in vars(self._pm.hook)]
        for attribute in dir(plugin):
            marked = self._pm.parse_hookimpl_opts(plugin, attribute)
            if marked is None:
                continue
            hook = marked["specname"] or attribute
            if hook not in known:
                return f"there is no hook {hook!r}; {_nearest(hook, known)}hooks: {', '.join(known)}"
            given = list(signature(getattr(hookspecs, hook)).parameters)
            for name, parameter in signature(getattr(plugin, attribute)).parameters.items():
                if name not in given and parameter.default is Parameter.empty:
                    return f"hook {hook!r} gives no {name!r}; {_nearest(name, given)}it gives: {', '.join(given)}"
        return ""

    # --- asking ---------------------------------------------------------------------------------

    def names(self, kind: str) -> list[str]:
        return list(self._found[kind])

    def all(self, kind: str | None = None) -> list[Registered]:
        kinds: Iterable[str] = KINDS if kind is None else (kind,)
        return [item for k in kinds for item in self._found[k].values()]

    def get(self, kind: str, name: str) -> type[Any]:
        """The technique class; an unknown name is a ConfigError that lists the known ones."""
        try:
            return self._found[kind][name].cls
        except KeyError:
            pass
        names = self.names(kind)
        fix = f"{_nearest(name, names)}known: {', '.join(names) or 'none'}"
        if self.broken:
            fix += "; plugins that failed to load: " + "; ".join(f"{k} ({v})" for k, v in self.broken.items())
        raise ConfigError(OPTION_OF_KIND[kind], name, f"no such {kind.replace('_', ' ')}", fix)

    def build(self, kind: str, choice: Choice) -> Any:
        """An instance with its options validated by the technique's own `Options` model."""
        cls = self.get(kind, choice.name)
        options = validate_options(OPTION_OF_KIND[kind], choice, cls.Options)
        with Blaming(kind, cls, "__init__"):
            return cls(options)


def validate_options(option: str, choice: Choice, model: type[BaseModel]) -> BaseModel:
    """Options of `choice` as `model`; the first mistake becomes a one-line ConfigError."""
    try:
        return model(**choice.options)
    except ValidationError as error:
        wrong = first_mistake(error)
        known = ", ".join(model.model_fields) or "none"
        if wrong.kind == "extra_forbidden":
            raise ConfigError(
                option, str(choice), f"{choice.name} has no option {wrong.where!r}", f"its options: {known}"
            ) from None
        # below a field stand the kinds of value that were tried; a mistake of no single field says itself what it is about
        what = f"{wrong.field}={choice.options.get(wrong.field)!r} " if wrong.field else ""
        raise ConfigError(
            option, str(choice), f"{choice.name}: {what}{wrong.problem}", f"{wrong.fix}; its options: {known}"
        ) from None


def _nearest(name: str, known: Sequence[str]) -> str:
    """A guess at what `name` was meant to be, with a blank behind; nothing where none is near."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _check_declaration(kind: str, cls: type[Any], plugin: str) -> None:
    missing = [a for a in ("name", "summary", "Options", "why_not", *_ALSO.get(kind, ())) if not hasattr(cls, a)]
    if missing:
        raise PluginError(
            f"plugin {plugin!r}: {kind} {cls.__name__} lacks {', '.join(missing)}; "
            "subclass twinfer.Technique or add these attributes"
        )
    if not (isinstance(cls.name, str) and cls.name and not set(cls.name) & set(" :,/=")):
        raise PluginError(f"plugin {plugin!r}: {kind} name {cls.name!r} must be a word without ' :,/='")
    for method in ("adapt_model", "adapt_ops") if kind not in ("attention", "quantizer") else ():
        if getattr(cls, method, None) not in (None, getattr(Technique, method)):
            raise PluginError(
                f"plugin {plugin!r}: {kind} {cls.name}: {method} is asked of attention variants and quantizers alone; "
                "register one of those, or leave it out"
            )
    if not (isinstance(cls.Options, type) and issubclass(cls.Options, BaseModel)):
        raise PluginError(f"plugin {plugin!r}: {kind} {cls.name}: Options must be a pydantic model")
    if kind == "device":
        _check_folders(cls, plugin)


def _check_folders(cls: type[Any], plugin: str) -> None:
    """PluginError unless a device plugin names folders that are there."""
    folders = {name: getattr(cls, name) for name in ("path", "links") if hasattr(cls, name)} or {"path": None}
    for name, folder in folders.items():
        if not (isinstance(folder, str | Path) and Path(folder).is_dir()):
            raise PluginError(
                f"plugin {plugin!r}: device {cls.name}: {name} is {short(folder)}; give the folder of its JSON files"
            )


_default: Registry | None = None


def default_registry() -> Registry:
    """The process's registry: built-ins and installed entry points, made on first use."""
    global _default
    if _default is None:
        _default = Registry()
    return _default


def set_default_registry(registry: Registry) -> None:
    """Used once by the CLI, when `-p` or `--plugins-dir` was given."""
    global _default
    _default = registry
