"""Built-in speculators."""

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.speculator.draft import Draft
from twinfer.plugins.speculator.eagle import Eagle
from twinfer.plugins.speculator.lookahead import Lookahead
from twinfer.plugins.speculator.medusa import Medusa
from twinfer.plugins.speculator.ngram import NGram


@hookimpl
def register_speculator(register: Register) -> None:
    for technique in (Draft, NGram, Medusa, Eagle, Lookahead):
        register(technique)
