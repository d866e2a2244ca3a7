"""Stop strings over an executor that returns several tokens a step, as speculation will."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from twinfer.core.core import Core
from twinfer.core.events import Finished, Submit, TokenDelta
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, Row, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.request import Request
from twinfer.core.runtime.pull_driver import PullDriver
from twinfer.core.runtime.stop_strings import StoppingExecutor
from twinfer.core.runtime.tokenizer import Tokenizer
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous


def letters() -> Tokenizer:
    backend = Backend(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, name="letters")


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Script:
    """Says what it was told to, `step` by `step`."""

    def __init__(self, *answers: RowResult) -> None:
        self.answers = list(answers)
        self.admitted: list[str] = []
        self.closed = 0

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        self.admitted += [seq for seq, _ in seqs]

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple(self.answers.pop(0) for _ in plan.rows), 1.0)

    def close(self) -> None:
        self.closed += 1


def plan(*seqs: str, forget: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(0, tuple(Row(s, 0, (1,), 0, Need.LAST, 0) for s in seqs), forget=forget)


def say(text: str) -> RowResult:
    return RowResult(ids(text), tuple({t: -float(i)} for i, t in enumerate(ids(text))), drafts=(9, 9))


def test_edge_29_a_multi_token_step_is_cut_after_the_completing_token() -> None:
    inner = Script(say("abc"), say("xyz"), say("dSTo"), say("STOP"), say("Ptail"), say("more"))
    executor = StoppingExecutor(inner, letters())
    stops = SamplingParams(stop=("STOP", "oP"))
    executor.admit(Request(id="s", prompt=(1,), params=stops), (("s", 0),))
    executor.admit(Request(id="free", prompt=(1,)), (("free", 0),))
    assert executor.execute(plan("s", "free")).rows == (say("abc"), say("xyz"))
    assert executor.execute(plan("s", "free")).rows == (say("dSTo"), say("STOP"))
    cut, free = executor.execute(plan("s", "free")).rows
    assert cut == RowResult(ids("P"), (say("P").logprobs[0],), stopped="oP")
    assert free == say("more")


def test_failures_and_rows_without_tokens_pass_through() -> None:
    failed, fed = RowResult(failure="no"), RowResult()
    executor = StoppingExecutor(Script(failed, fed, say("ab")), letters())
    executor.admit(Request(id="s", prompt=(1,), params=SamplingParams(stop=("ab",))), (("s", 0),))
    assert executor.execute(plan("s")).rows == (failed,)
    assert executor.execute(plan("s")).rows == (fed,)
    assert executor.execute(plan("s")).rows[0].stopped == "ab"


def test_a_reused_id_starts_a_new_text() -> None:
    executor = StoppingExecutor(Script(say("a"), say("b"), say("b")), letters())
    request = Request(id="s", prompt=(1,), params=SamplingParams(stop=("ab",)))
    executor.admit(request, (("s", 0),))
    executor.execute(plan("s"))
    executor.execute(plan(forget=("s",)))
    executor.admit(request, (("s", 0),))
    assert executor.execute(plan("s")).rows[0].stopped is None
    executor.close()
    assert executor.inner.closed == 1  # type: ignore[attr-defined]


def test_edge_29_core_and_caller_see_the_same_cut() -> None:
    """Two samples with their own texts; what Core commits is what the stream keeps."""
    script = Script(*(RowResult(ids(c)) for c in "sttsoto"))  # two rows a step, then one
    core = Core(Continuous(), Paged(), Limits(max_num_seqs=4, num_blocks=8, max_model_len=32))
    driver = PullDriver(core, StoppingExecutor(script, letters()))
    for name in ("one", "two"):
        driver.put(Submit(Request(id=name, prompt=(1, 2), params=SamplingParams(stop=("sto", "stop"), max_tokens=20))))
    seen: list[object] = []
    while (outputs := driver.poll()) is not None:
        seen += outputs
    tokens = {
        n: [t for o in seen if isinstance(o, TokenDelta) and o.request_id == n for t in o.tokens]
        for n in ("one", "two")
    }
    ends = {o.request_id: (o.reason, o.detail, o.num_output_tokens) for o in seen if isinstance(o, Finished)}
    assert tokens == {"one": list(ids("sto")), "two": list(ids("tsto"))}
    assert ends == {"one": ("stop", "sto", 3), "two": ("stop", "sto", 4)}
    assert core.audit() == []
