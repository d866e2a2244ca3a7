"""Kit of schedulers, and what it shares with that of KV caches: both are played."""

from __future__ import annotations

from typing import Any

from twinfer.plugins.conformance.kit import Kit, require
from twinfer.plugins.conformance.played import Played, Player, Traffic


class PlayedKit(Kit):
    """What the kits of schedulers and KV caches share."""

    def traffic(self, seed: int, tight: bool, prefix: str = "r") -> Traffic:
        """The script of `seed`."""
        return Traffic.random(seed, tight, prefix)

    def parts(self, traffic: Traffic) -> tuple[Any, Any]:
        """(scheduler, kv_cache) to play `traffic` with."""
        raise NotImplementedError

    def play(self, seed: int, tight: bool, prefix: str = "r", checks_policy: bool = False) -> Played:
        traffic = self.traffic(seed, tight, prefix)
        player = Player(traffic, *self.parts(traffic), where=type(self).technique.name)
        player.checks_policy = checks_policy
        return player.play()

    def test_every_request_is_served_when_memory_is_ample(self) -> None:
        for seed in self.seeds:
            traffic = self.traffic(seed, tight=False)
            played = self.play(seed, tight=False)
            for request in traffic.requests:
                for index in range(request.params.num_samples):
                    reason, why = (found.get((request.id, index), "") for found in (played.endings, played.details))
                    fine = reason == "length" or (reason == "abort" and request.id in traffic.aborts)
                    who = f"{request.id}/{index} (a prompt of {len(request.prompt)}, {request.params.max_tokens} to answer)"
                    how = f"ended as {reason}: {why or 'no reason is given'}" if reason else "never ended"
                    require(fine, f"{self.technique.name}, seed {seed}: {who} {how}")

    def test_every_request_ends_when_memory_is_short(self) -> None:
        for seed in self.seeds:
            traffic = self.traffic(seed, tight=True)
            endings = self.play(seed, tight=True).endings
            for request in traffic.requests:
                require((request.id, 0) in endings, f"{self.technique.name}, seed {seed}: {request.id} never ended")

    def test_equal_traffic_gives_equal_plans(self) -> None:
        """Also when ids, and so their hashes, differ: nothing may depend on the order of a set."""
        for seed in self.seeds:
            plans = self.play(seed, tight=seed % 2 == 0).plans
            require(
                plans == self.play(seed, tight=seed % 2 == 0).plans,
                f"{self.technique.name}, seed {seed}: the same events gave different plans",
            )
            renamed = [p.replace('"q', '"r') for p in self.play(seed, tight=seed % 2 == 0, prefix="q").plans]
            require(plans == renamed, f"{self.technique.name}, seed {seed}: plans depend on the names of requests")


class SchedulerKit(PlayedKit):
    """Contract of `twinfer.core.policy.Scheduler`."""

    def parts(self, traffic: Traffic) -> tuple[Any, Any]:
        from twinfer.plugins.kv_cache.paged import Paged

        return self.build(), Paged(Paged.Options(block_size=traffic.block_size))

    def test_answers_are_a_pure_function_of_the_view(self) -> None:
        for seed in self.seeds:
            self.play(seed, tight=seed % 2 == 0, checks_policy=True)

    def test_it_serves_the_contiguous_cache_too(self) -> None:
        from twinfer.plugins.kv_cache.contiguous import Contiguous

        for seed in self.seeds:
            traffic = Traffic.random(seed, tight=True, kv_cache=Contiguous())
            played = Player(traffic, self.build(), Contiguous(), f"{self.technique.name} on contiguous").play()
            missing = [r.id for r in traffic.requests if (r.id, 0) not in played.endings]
            require(not missing, f"{self.technique.name} on contiguous, seed {seed}: {missing} never ended")
