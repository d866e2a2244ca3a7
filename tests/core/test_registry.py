"""Finding plugins: names and clashes, broken ones, misspelt hooks, folders, modules, entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from twinfer.core import hookspecs
from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError, PluginError
from twinfer.core.registry import Registry, default_registry, set_default_registry, validate_options
from twinfer.core.technique import KINDS
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous

PLUGIN = """
    from pydantic import Field
    from twinfer.core.hookspecs import hookimpl
    from twinfer.core.technique import Options, Technique
    from twinfer.plugins.scheduler.continuous import Continuous

    __version__ = "1.2"

    class Mine(Continuous):
        name = "{name}"
        summary = "for a test"

        class Options(Options):
            patience: int = Field(3, ge=0)

    @hookimpl
    def register_scheduler(register):
        register(Mine)
"""


@pytest.fixture(autouse=True)
def clean_modules() -> Iterator[None]:
    before = set(sys.modules)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith(("twinfer_plugin_", "tw_")):
            del sys.modules[name]


def write(folder: Path, file: str, text: str = PLUGIN, name: str = "mine") -> Path:
    path = folder / f"{file}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text).replace("{name}", name))
    return path


def install(site: Path, dist: str, module: str, entry_point: str, version: str = "3.4") -> None:
    """A distribution as an installer leaves it: metadata with an entry point of group `twinfer`."""
    info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[twinfer]\n{entry_point} = {module}\n")


# --- built-ins --------------------------------------------------------------------------------------


def test_built_ins_register_through_the_hooks() -> None:
    registry = Registry(entry_points=False)
    assert {"continuous", "static"} <= set(registry.names("scheduler"))
    assert {"paged", "contiguous"} <= set(registry.names("kv_cache"))
    assert registry.get("scheduler", "continuous") is Continuous
    assert all(item.builtin and item.cls.summary for item in registry.all())
    assert [item.name for item in registry.all("kv_cache")] == registry.names("kv_cache")
    assert set(KINDS) >= {item.kind for item in registry.all()}


def test_a_name_that_is_unknown_gets_suggestions() -> None:
    registry = Registry(entry_points=False)
    with pytest.raises(ConfigError) as caught:
        registry.get("scheduler", "continous")
    assert str(caught.value).startswith(
        "--scheduler='continous': no such scheduler; did you mean 'continuous'? known: "
    )
    with pytest.raises(ConfigError, match="--quant='x': no such quantizer"):
        registry.get("quantizer", "x")
    with pytest.raises(ConfigError, match=r"--kv-cache='zzz'.*known: paged, contiguous"):
        registry.get("kv_cache", "zzz")


def test_options_are_checked_by_the_technique() -> None:
    registry = Registry(entry_points=False)
    cache = registry.build("kv_cache", Choice(name="paged", options={"block_size": 32}))
    assert isinstance(cache, Paged) and cache.options.block_size == 32
    with pytest.raises(ConfigError, match="paged has no option 'block'; its options: block_size, prefix_sharing"):
        registry.build("kv_cache", Choice(name="paged", options={"block": 32}))
    with pytest.raises(ConfigError, match=r"block_size=0 is too small; give at least 1; its options"):
        registry.build("kv_cache", Choice(name="paged", options={"block_size": 0}))
    with pytest.raises(ConfigError, match="contiguous has no option 'x'; its options: none"):
        registry.build("kv_cache", Choice(name="contiguous", options={"x": 1}))
    with pytest.raises(ConfigError) as error:
        validate_options("--opt", Choice(name="p", options={"headroom": "a"}), Paged.Options)
    assert error.value.option == "--opt" and "\n" not in str(error.value)


# --- folders and modules ------------------------------------------------------------------------------


def test_a_folder_of_plugins_is_loaded_by_name(tmp_path: Path) -> None:
    write(tmp_path, "b_plugin", name="second")
    write(tmp_path, "a_plugin", name="first")
    (tmp_path / "notes.txt").write_text("not a plugin")
    registry = Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert registry.names("scheduler")[-2:] == ["first", "second"]
    item = registry.all("scheduler")[-1]
    assert (item.plugin, item.version, item.source, item.builtin) == (
        "b_plugin",
        "1.2",
        str(tmp_path / "b_plugin.py"),
        False,
    )
    built = registry.build("scheduler", Choice(name="second", options={"patience": 9}))
    assert built.options.patience == 9


def test_a_folder_that_is_missing_or_broken_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no such folder; give a folder"):
        Registry(plugin_dirs=[tmp_path / "nowhere"], entry_points=False)
    write(tmp_path, "broken", "import no_such_module_at_all")
    with pytest.raises(PluginError, match=r"broken\.py fails to load \(ModuleNotFoundError"):
        Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert "twinfer_plugin_broken" not in sys.modules
    write(tmp_path, "broken", "def f(:")
    with pytest.raises(PluginError, match="SyntaxError"):
        Registry(plugin_dirs=[tmp_path], entry_points=False)


def test_a_module_is_loaded_by_name_or_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "tw_module", name="by-module")
    sys.path.insert(0, str(tmp_path))
    registry = Registry(modules=["tw_module"], entry_points=False)
    item = registry.all("scheduler")[-1]
    assert (item.name, item.plugin, item.source) == ("by-module", "tw_module", "module tw_module")
    with pytest.raises(PluginError, match="-p tw_missing: cannot be imported"):
        Registry(modules=["tw_missing"], entry_points=False)
    with pytest.raises(PluginError, match="registered twice; rename one"):
        Registry(modules=["tw_module", "tw_module"], entry_points=False)


# --- clashes ------------------------------------------------------------------------------------------


def test_the_first_to_register_a_name_owns_it(tmp_path: Path) -> None:
    write(tmp_path, "one", name="continuous")
    write(tmp_path, "two", name="continuous")
    registry = Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert registry.get("scheduler", "continuous") is Continuous
    assert registry.names("scheduler")[-2:] == ["one/continuous", "two/continuous"]
    assert registry.get("scheduler", "one/continuous") is not registry.get("scheduler", "two/continuous")
    assert registry.build("scheduler", Choice.model_validate("one/continuous:patience=4")).options.patience == 4


def test_one_plugin_cannot_use_a_name_twice(tmp_path: Path) -> None:
    write(tmp_path, "twice", PLUGIN + "        register(Mine)\n        register(Mine)\n")
    with pytest.raises(PluginError, match="'twice' registers scheduler 'mine' twice"):
        Registry(plugin_dirs=[tmp_path], entry_points=False)


# --- contracts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (PLUGIN.replace("def register_scheduler", "def register_schedulers"), "register_schedulers"),
        (PLUGIN.replace("(register):", "(registrar):"), "registrar"),
        (PLUGIN.replace("register(Mine)", "raise OSError('no disk')"), "no disk"),
        (PLUGIN.replace("class Mine(Continuous)", "class Mine"), "lacks why_not"),
        (PLUGIN.replace('name = "{name}"', 'name = "two words"'), "must be a word"),
        (PLUGIN.replace('name = "{name}"', 'name = "a/b"'), "must be a word"),
        (PLUGIN.replace('name = "{name}"', 'name = ""'), "must be a word"),
        (PLUGIN.replace("class Options(Options)", "class Options"), "pydantic model"),
    ],
    ids=["misspelt hook", "wrong argument", "raises", "no technique", "two words", "slash", "no name", "options"],
)
def test_a_plugin_that_breaks_its_contract_is_an_error_that_names_it(tmp_path: Path, text: str, problem: str) -> None:
    write(tmp_path, "faulty", text)
    with pytest.raises(PluginError, match=problem) as caught:
        Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert "faulty" in str(caught.value)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("pass", "path is None"),
        ("path = 7", "path is 7"),
        ("path = 'no/such/folder'", "path is 'no/such/folder'"),
        ("links = 7", "links is 7"),
        ("path = '.'; links = 'no/such/folder'", "links is 'no/such/folder'"),
    ],
)
def test_a_device_plugin_names_folders_that_exist(tmp_path: Path, attributes: str, said: str) -> None:
    text = f"from twinfer import Technique, hookimpl\nclass D(Technique):\n    name, summary = 'd', 's'\n    {attributes}\n"
    write(tmp_path, "faulty", f"{text}@hookimpl\ndef register_device(register): register(D)\n")
    with pytest.raises(PluginError) as caught:
        Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert str(caught.value) == f"plugin 'faulty': device d: {said}; give the folder of its JSON files"


@pytest.mark.parametrize(("kind", "lacks"), [("cli_command", "run"), ("dashboard_page", "render")])
def test_a_command_or_page_without_its_function_is_refused(tmp_path: Path, kind: str, lacks: str) -> None:
    text = "from twinfer import Technique, hookimpl\nclass T(Technique):\n    name, summary = 't', 's'\n"
    write(tmp_path, "faulty", f"{text}@hookimpl\ndef register_{kind}(register): register(T)\n")
    with pytest.raises(PluginError, match=f"plugin 'faulty': {kind} T lacks {lacks}; "):
        Registry(plugin_dirs=[tmp_path], entry_points=False)


HOOKS = ", ".join(name for name in vars(hookspecs) if name.startswith(("register_", "on_")))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def register_scheduler", "def register_shedulers", f"there is no hook 'register_shedulers'; did you mean 'register_scheduler'? hooks: {HOOKS}"),
        ("@hookimpl", "@hookimpl(specname='on_setp')", f"there is no hook 'on_setp'; did you mean 'on_step'? hooks: {HOOKS}"),
        ("def register_scheduler", "def zzz", f"there is no hook 'zzz'; hooks: {HOOKS}"),
        ("(register):", "(registrar):", "hook 'register_scheduler' gives no 'registrar'; did you mean 'register'? it gives: register"),
        ("def register_scheduler(register)", "def on_step(plan, what)", "hook 'on_step' gives no 'what'; it gives: plan, result"),
    ],
)  # fmt: skip
def test_what_is_misspelt_in_a_hook_is_named_with_what_there_is(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = write(tmp_path, "faulty", PLUGIN.replace(old, new))
    with pytest.raises(PluginError) as caught:
        Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert str(caught.value) == f"plugin 'faulty' ({path}): {said}"


# --- entry points -------------------------------------------------------------------------------------


def test_installed_plugins_are_found_with_their_version(tmp_path: Path) -> None:
    write(tmp_path, "tw_installed", name="installed")
    install(tmp_path, "tw-dist", "tw_installed", "tidy")
    sys.path.insert(0, str(tmp_path))
    registry = Registry()
    item = next(item for item in registry.all("scheduler") if item.name == "installed")
    assert (item.plugin, item.version, item.source) == ("tidy", "3.4", "entry point tw_installed")
    assert "tidy" not in registry.broken
    assert "installed" not in Registry(entry_points=False).names("scheduler")


def test_a_broken_installed_plugin_is_told_but_takes_nothing_down(tmp_path: Path) -> None:
    write(tmp_path, "tw_works", name="works")
    write(tmp_path, "tw_raises", "raise RuntimeError('half installed')")
    write(tmp_path, "tw_misspelt", PLUGIN.replace("def register_scheduler", "def register_shedulers"))
    write(tmp_path, "tw_argument", PLUGIN.replace("(register):", "(registrar):"))
    install(tmp_path, "tw-0", "tw_argument", "0-argument")
    install(tmp_path, "tw-a", "tw_raises", "a-raises")
    install(tmp_path, "tw-b", "tw_missing_module", "b-missing")
    install(tmp_path, "tw-c", "tw_misspelt", "c-misspelt")
    install(tmp_path, "tw-d", "tw_works", "d-works")
    sys.path.insert(0, str(tmp_path))
    registry = Registry()
    assert {"0-argument", "a-raises", "b-missing", "c-misspelt"} <= set(registry.broken)
    assert "half installed" in registry.broken["a-raises"]
    assert "register_shedulers" in registry.broken["c-misspelt"]
    assert "works" in registry.names("scheduler")
    with pytest.raises(ConfigError) as caught:
        registry.get("scheduler", "mine")
    assert "plugins that failed to load: " in str(caught.value)
    assert "a-raises (RuntimeError: half installed)" in str(caught.value) and "\n" not in str(caught.value)


def test_the_process_has_one_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinfer.core.registry._default", None)
    first = default_registry()
    assert default_registry() is first
    other = Registry(entry_points=False)
    set_default_registry(other)
    assert default_registry() is other


@pytest.mark.parametrize("method", ["adapt_model", "adapt_ops"])
def test_changes_of_the_model_are_refused_where_nobody_asks_for_them(tmp_path: Path, method: str) -> None:
    for kind in ("scheduler", "kv_cache", "router", "attention", "quantizer"):
        (tmp_path / "changing.py").write_text(
            "from twinfer import Technique, hookimpl\n"
            f"class Changing(Technique):\n    name = 'changing'\n    summary = 's'\n    def {method}(self, first, *more): return first\n"
            f"@hookimpl\ndef register_{kind}(register): register(Changing)\n"
        )
        if kind in ("attention", "quantizer"):
            assert "changing" in Registry(plugin_dirs=[tmp_path], entry_points=False).names(kind)
        else:
            with pytest.raises(PluginError, match=f"{kind} changing: {method} is asked of attention"):
                Registry(plugin_dirs=[tmp_path], entry_points=False)
