"""Links that say what cannot be: every page draws all the same, and names each parameter with what would work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from streamlit.testing.v1 import AppTest

from twinfer.core.config import Choice, EngineConfig
from twinfer.dashboard.explain import explain, in_controls
from twinfer.dashboard.forms import OptionField, seed_of
from twinfer.dashboard.link import MOST, VIEW, read
from twinfer.dashboard.scenario import Scenario

pytestmark = pytest.mark.usefixtures("no_cached_pages")

PAGES = ("techniques", "compare", "memory", "roofline", "capacity")
SMALL = {"num_requests": "2", "output_len": "4", "input_len": "8", "spread": "0"}
NUMBERS = [
    name for name, field in Scenario.model_fields.items() if field.annotation in (int, float) and name not in SMALL
]
ODD = ["", "word", "nan", "inf", "-inf", "-1", "1e99", "9" * 40, "9" * 5000, "1,5", "0x10", "٣", "💥", "\0", "<b>"]
RAW = (
    "Input should",
    "String should",
    "validation error",
    "unable to parse",
    "internal error",
    "Traceback",
    "pydantic",
)


def _script(root: str, page: str) -> None:
    from twinfer.dashboard.app import main

    main(["--runs-dir", root], first=page)


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., AppTest]:
    def open_page(name: str, params: dict[str, Any]) -> AppTest:
        at = AppTest.from_function(_script, args=(str(tmp_path), name), default_timeout=300)
        for key, value in params.items():
            at.query_params[key] = value
        at.run()
        assert not at.exception
        assert at.title
        assert not any(raw in text for text in said(at) for raw in RAW)
        return at

    return open_page


def said(at: AppTest) -> list[str]:
    """Warnings and errors as they are read, without what escapes Markdown."""
    boxes = [e.value.replace("\\", "") for e in (*at.warning, *at.error)]
    return [line.removeprefix("* ") for box in boxes for line in box.split("\n")]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("value", ["", "nan", "9" * 40])
def test_no_number_reaches_a_page_that_is_none(page, name, value):
    wrong = dict.fromkeys(("tp", "seed", "memory_fraction", "plan_rate", "plan_percentile", "max_num_seqs"), value)
    told = said(page(name, {**SMALL, **wrong}))
    for parameter in wrong:
        assert any(text.startswith(f"{parameter}=") and "; give" in text for text in told), (parameter, told)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_a_link_is_read_or_told(name, value):
    found, _, problems = read({name: [value]})
    assert found == Scenario() and len(problems) == 1
    assert problems[0].startswith(f"{name}=") and "; give" in problems[0] and len(problems[0]) < 300
    assert not any(raw in problems[0] for raw in RAW)


@pytest.mark.parametrize("name", PAGES)
def test_what_is_looked_at_is_told_where_it_cannot_be(page, name):
    at = page(
        name,
        {
            **SMALL,
            "job": "../x",
            "real": "<b>",
            "predicted": "💥",
            "metric": "nope",
            "axis": "up",
            "batch": "0",
            "v": "9",
        },
    )
    told = said(at)
    for parameter in (*VIEW, "v"):
        assert any(text.startswith(f"{parameter}=") for text in told), (parameter, told)
    assert any("give time or step" in t for t in told) and any("from 1 to 16384" in t for t in told)
    assert not set(VIEW) & set(at.query_params)


@pytest.mark.parametrize("batch", ["0", "-1", "1e3", "٣", "²", "9" * 30, "16385", "", " 4"])
def test_rows_of_a_decode_step_are_a_whole_number(batch):
    _, looked_at, problems = read({"batch": [batch]})
    assert not looked_at and problems[0].startswith(f"batch={batch!r}")


def test_parameters_that_are_unknown_or_given_twice(page):
    at = page("memory", {**SMALL, "max_num_seq": "3", "💥": "1", "tp": ["1", "3"]})
    told = said(at)
    assert any("'max_num_seq'" in t and "did you mean 'max_num_seqs'?" in t for t in told)
    assert any(t.startswith("'💥' in the link was ignored") for t in told)
    assert any(t.startswith("tp is given 2 times") for t in told)
    assert at.number_input(key="w_tp").value == 3


def test_a_mistake_is_told_of_the_parameter_that_has_it():
    _, _, problems = read({"plan_rate": ["many"], "tp": ["0"], "image_size": ["big"], "dtype": ["float7"]})
    told = {problem.partition("=")[0]: problem for problem in problems}
    assert len(problems) == 4 and "1024x768" in told["image_size"] and "give a number" in told["plan_rate"]
    assert "at least 1" in told["tp"] and "'bfloat16'" in told["dtype"]


def test_mistakes_of_a_link_share_one_box(page):
    at = page("memory", {**SMALL, "tp": "0", "foo": "1", "*": "2"})
    (box,) = at.warning
    assert box.value.count("\n* ") == 2 and r"'\*'" in box.value


def test_a_link_of_many_mistakes_does_not_fill_the_page():
    _, _, problems = read({f"k{i}": ["x"] for i in range(500)})
    assert len(problems) == MOST and "489 more" in problems[-1]


@pytest.mark.parametrize("name", PAGES)
def test_markdown_of_a_link_stays_text(page, name):
    told = page(name, {**SMALL, "tp": "[x](http://a) **b** :red[c] $d$"}).warning[0].value
    assert r"\[x\](http\://a) \*\*b\*\* \:red\[c\] \$d\$" in told


OF_OPTIONS = [
    "word", "nan", "NaN", "-Infinity", "-1", "true", "[1]", '{"a":1}', '"x"', "", "9" * 5000, "[" * 20000,
]  # fmt: skip


@pytest.mark.parametrize("value", OF_OPTIONS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("techniques", ["--scheduler:continuous:chunk_size"]), ("capacity", ["--speculator:ngram:num_tokens"]),
     ("memory", ["--kv-cache:paged:block_size", "--scheduler:static:max_wait_s"])],
)  # fmt: skip
def test_options_of_a_technique_that_cannot_be(page, name, options, value):
    given = {flag: rest for flag, _, rest in (option.partition(":") for option in options)}
    at = page(name, {**SMALL, **{f.strip("-").replace("-", "_"): f"{rest}={value}" for f, rest in given.items()}})
    for flag in given:
        told = [text for text in said(at) if text.startswith(in_controls(flag))]
        assert told and all("; give" in text for text in told), said(at)


@pytest.mark.parametrize("value", ["null", "1.5", "1e99", "9" * 30, "Infinity", "0", "1"])
def test_a_page_draws_whatever_an_option_says(page, value):
    page("roofline", {**SMALL, "quantizer": f"int4:group_size={value}", "scheduler": f"static:max_wait_s={value}"})


@pytest.mark.parametrize("value", ["", "nope", "💥", "a" * 5000, "\0", "../..", "[x](http://a)", ":", "paged:=", "x:y"])
def test_techniques_that_are_none(page, value):
    flags = {"scheduler": "--scheduler", "kv_cache": "--kv-cache", "speculator": "--speculator", "attention": "--attention",
             "quantizer": "--quant"}  # fmt: skip
    told = said(page("memory", {**SMALL, **dict.fromkeys(flags, value)}))
    for kind, flag in flags.items():
        assert any(
            text.startswith((in_controls(flag), f"{kind}="))
            and any(word in text for word in ("known:", "write NAME", "give"))
            for text in told
        ), (kind, told)


@pytest.mark.parametrize("value", ["nope", "/dev/zero", "/", "..", "💥", "\0", "http://x", "owner/..", "~nobody"])
def test_models_and_devices_that_are_none(page, value):
    assert any(value.replace("\0", "x00") in text for text in said(page("memory", {**SMALL, "model": value})))
    assert any(text.startswith("Device=") for text in said(page("memory", {**SMALL, "device": value})))


@pytest.mark.parametrize("name", ["techniques", "roofline", "capacity"])
def test_other_pages_name_a_model_or_device_that_is_none(page, name):
    assert any("'nope'" in text for text in said(page(name, {**SMALL, "model": "nope"})))
    assert any(
        t.startswith("Device='nope'") for t in said(page(name, {**SMALL, "device": "nope", "plan_devices": "nope"}))
    )


@pytest.mark.parametrize(
    "params",
    [
        {"tp": "1024", "pp": "1024", "cp": "1024", "dp": "1024", "ep": "1024"},
        {"input_len": "1000000", "output_len": "1000000", "num_requests": "100000", "max_model_len": "10000000", "spread": "1"},
        {"num_requests": "100000", "rate": "1000000", "max_num_seqs": "4096", "max_num_batched_tokens": "1000000"},
        {"max_model_len": "1", "input_len": "1", "output_len": "1", "memory_fraction": "1e-9"},
        {"rate": "1e-300", "plan_tpot": "1e-300", "plan_scale": "1000", "plan_devices": ",,,", "plan_trace": "/dev/zero"},
        {"base_scheduler": "nope", "base_kv_cache": "", "base_max_num_seqs": "4096"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", PAGES)
def test_the_ends_of_what_is_allowed(page, name, params):
    page(name, params)


# --- words --------------------------------------------------------------------------------------


def test_edits_name_the_control_and_what_would_work():
    with pytest.raises(ValidationError) as error:
        Scenario().edited(max_num_seqs=0)
    assert explain(error.value) == "Rows in a batch=0: is too small; give at least 1"
    with pytest.raises(ValidationError) as error:
        Scenario(max_model_len=1).config()
    assert explain(error.value) == "Context=1: is too small; give at least 2"
    with pytest.raises(ValidationError) as error:
        EngineConfig(**{"model": "m", "nope": 1})
    assert explain(error.value) == "nope=1: is not known; leave it out"
    assert explain(KeyError("x")).startswith("internal error")


def test_options_of_the_command_line_are_called_what_their_controls_are_called():
    told = "--tp=3: no; try --tp 4 --quant int4, --kv-dtype fp8 or --max-num-batched-tokens 512 (--price l40s=1), not a--tp"
    assert in_controls(told) == (
        "Tensor parallel=3: no; try Tensor parallel 4 Quantization int4, KV data type fp8 or Tokens per step 512 "
        "(the command line's --price l40s=1), not a--tp"
    )
    assert in_controls("--scheduler='x': unknown") == "Scheduler='x': unknown"


def test_choices_of_any_text_are_kept_as_text():
    assert Choice.model_validate("a:b=" + "9" * 5000).options == {"b": "9" * 5000}
    assert Choice.model_validate("a:b=" + "[" * 20000).options == {"b": "[" * 20000}


@pytest.mark.parametrize("value", ["word", None, [1], {}, float("nan"), float("inf"), 10**400, 2**53, "9" * 30, 1.5])
def test_a_widget_shows_nothing_for_what_is_no_number_of_its_kind(value):
    assert seed_of(OptionField(name="size", kind="int"), value) is None


def test_a_widget_stays_within_its_bounds():
    size = OptionField(name="size", kind="int", minimum=1, maximum=8)
    assert [seed_of(size, v) for v in (-3, 4, "5", 99)] == [1, 4, 5, 8]
    assert isinstance(seed_of(size, 4.0), int) and seed_of(OptionField(name="share", kind="float"), 1.5) == 1.5
