"""New weights behind a pool: what is paused, labelled, dropped and proven."""

import asyncio

import pytest
from fleet import Fleet, Weighted
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import virtually

from prorl_gym.deadlines import Deadline
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.inference.weights.weight_updater import WeightUpdateError, WeightUpdateOptions
from prorl_gym.testing.inference.engine_conformance import request


async def settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def begun(fleet: Fleet, max_tokens: int, turns: int) -> asyncio.Task[GenerationResult]:
    """Begin a call, and let the loop turn so often."""
    call = asyncio.create_task(fleet.pool.generate(request(max_tokens=max_tokens)))
    await settle(turns)
    return call


def honest(result: GenerationResult) -> bool:
    """Whether every token says which weights sampled it."""
    return result.versions == [Weighted.weights_of(token) for token in result.token_ids]


async def test_a_pause_cuts_calls_short_and_what_goes_on_is_of_the_new_version():
    async with Fleet(2) as fleet:
        call = await begun(fleet, 50, 10)
        await fleet.updater.pause("abort")
        first = await call
        assert (first.finish_reason, first.aborted_by_pause) == ("abort", True)
        waiting = asyncio.create_task(fleet.pool.generate(request()))
        await settle()
        assert not waiting.done()
        fleet.load(1)
        await fleet.updater.update(1)
        await settle()
        assert not waiting.done(), "the trainer has not said go"
        await fleet.updater.resume()
        second = await waiting
    assert first.token_ids
    assert honest(first)
    assert honest(second)
    assert set(second.versions) == {1}
    assert not second.aborted_by_pause


async def test_draining_waits_for_the_calls_that_are_on_their_way():
    async with Fleet(1) as fleet:
        call = await begun(fleet, 30, 3)
        await fleet.updater.pause("drain")
        assert call.done()
        assert (await call).finish_reason == "length"


async def test_engines_that_do_not_tell_versions_cannot_keep_calls():
    async with Fleet(1) as fleet:
        call = await begun(fleet, 1000, 3)
        with pytest.raises(WeightUpdateError, match="engine-0 does not report which weights") as caught:
            await fleet.updater.pause("keep")
        assert caught.value.fix == "Pause with 'abort' or 'drain'."
        with pytest.raises(WeightUpdateError, match="does not report") as caught:
            await fleet.updater.update(1)
        assert caught.value.fix == "Pause the policy before its weights change."
        await fleet.updater.resume()
        call.cancel()


async def test_a_kept_call_goes_on_with_new_weights_and_labels_them():
    async with Fleet(1, reports_versions=True) as fleet:
        await fleet.pool.generate(request())
        call = await begun(fleet, 40, 10)
        await fleet.updater.pause("keep")
        fleet.load(1)
        await fleet.updater.update(1)
        await fleet.updater.resume()
        result = await call
    assert set(result.versions) == {0, 1}
    assert honest(result)


@virtually
async def test_no_deadline_pays_for_a_pause():
    async def roll(fleet: Fleet) -> Deadline:
        async with Deadline(0.03) as deadline:
            await fleet.pool.generate(request())
        return deadline

    async with Fleet(1) as fleet:
        await fleet.updater.pause()
        rolling = asyncio.create_task(roll(fleet))
        await asyncio.sleep(0.08)
        await fleet.updater.resume()
        assert (await rolling).paused_seconds >= 0.05


@virtually
async def test_no_deadline_pays_for_a_call_that_an_engine_keeps():
    async def roll(fleet: Fleet) -> Deadline:
        async with Deadline(0.05) as deadline:
            await fleet.pool.generate(request(max_tokens=40))
        return deadline

    async with Fleet(1, reports_versions=True) as fleet:
        await fleet.pool.generate(request())
        rolling = asyncio.create_task(roll(fleet))
        await settle(5)
        fleet.engines[0].frozen.clear()
        await fleet.updater.pause("keep")
        await asyncio.sleep(0.1)
        fleet.engines[0].frozen.set()
        await fleet.updater.resume()
        assert (await rolling).paused_seconds >= 0.09


async def test_an_engine_that_does_not_end_its_calls_is_named():
    async with Fleet(1, options=WeightUpdateOptions(abort_seconds=0.05, first_retry_seconds=0.01)) as fleet:
        fleet.engines[0].deaf = True
        call = await begun(fleet, 10**6, 3)
        with pytest.raises(WeightUpdateError, match=r"engine-0 did not end 1 calls within 0.05 s"):
            await fleet.updater.pause()
        assert fleet.updater.paused
        call.cancel()


async def test_a_word_that_came_before_its_call_is_said_again():
    async with Fleet(1, options=WeightUpdateOptions(first_retry_seconds=0.001)) as fleet:
        fleet.engines[0].misses = 2
        call = await begun(fleet, 10**6, 3)
        await fleet.updater.pause()
        assert (await call).aborted_by_pause


async def test_each_version_has_a_salt_of_its_own():
    async with Fleet(1, salted=True) as fleet:
        await fleet.pool.generate(request())
        await fleet.pool.generate(request(cache_salt="mine"))
        await fleet.update(1)
        await fleet.pool.generate(request())
        assert [asked.cache_salt for asked in fleet.engines[0].requests] == ["v0", "mine/v0", "v1"]


async def test_caches_are_dropped_with_patience():
    async with Fleet(2, options=WeightUpdateOptions(first_retry_seconds=0.001)) as fleet:
        fleet.engines[0].held_for = 3
        updated = await fleet.update(1)
        assert updated.serving == ("engine-0", "engine-1")
        assert [engine.cache_resets for engine in fleet.engines] == [1, 1]


async def test_an_engine_that_keeps_old_work_serves_only_salted_calls():
    options = WeightUpdateOptions(first_retry_seconds=0.001, max_cache_resets=3, max_retry_seconds=0.01)
    for salted, serving in ((False, ("engine-1",)), (True, ("engine-0", "engine-1"))):
        async with Fleet(2, salted=salted, options=options) as fleet:
            fleet.engines[0].refuses_cache_reset = True
            updated = await fleet.update(1)
            assert updated.serving == serving
            assert fleet.pool.healthy == list(serving)
            if not salted:
                assert updated.quarantined == {
                    "engine-0": "its prefix cache holds older weights' work and could not be dropped"
                }
                fleet.engines[0].refuses_cache_reset = False
                await fleet.serving(2)


async def test_the_loader_of_the_weights_may_have_dropped_the_caches():
    async with Fleet(1) as fleet:
        fleet.engines[0].refuses_cache_reset = True
        await fleet.pause_and_load(1)
        assert (await fleet.updater.update(1, caches_dropped=True)).serving == ("engine-0",)


async def test_an_engine_with_old_weights_serves_nothing_until_it_has_the_new_ones():
    async with Fleet(3) as fleet:
        await fleet.pause_and_load(1, only=(0, 2))
        updated = await fleet.updater.update(1)
        await fleet.updater.resume()
        assert updated.serving == ("engine-0", "engine-2")
        assert "stale" in updated.quarantined["engine-1"]
        results = await asyncio.gather(*(fleet.pool.generate(request(session_id=f"s{n}")) for n in range(6)))
        assert {result.engine for result in results} == {"engine-0", "engine-2"}
        assert all(honest(result) for result in results)
        (quarantined,) = [one for one in fleet.pool.snapshot().engines if one.quarantine_reason]
        assert quarantined.name == "engine-1"
        fleet.load(1)
        await fleet.serving(3)


async def test_the_trainers_reference_decides():
    async with Fleet(2) as fleet:
        await fleet.pause_and_load(1, only=(0,))
        fleet.load(5, only=(1,))
        reference = await fleet.engines[0].probe_logprobs(fleet.updater.probe_token_ids)
        updated = await fleet.updater.update(1, reference_logprobs=reference)
        assert updated.serving == ("engine-0",)
        assert "away from the trainer" in updated.quarantined["engine-1"]


async def test_without_one_engine_left_the_update_fails_and_nothing_is_served_until_the_next():
    async with Fleet(2) as fleet:
        await fleet.pause_and_load(1, only=(0,))
        fleet.load(5, only=(1,))
        with pytest.raises(WeightUpdateError, match="no engine has version 1") as caught:
            await fleet.updater.update(1)
        assert len(str(caught.value).splitlines()) == 2
        await fleet.updater.resume()
        with pytest.raises(EngineError, match="no engine was well"):
            await fleet.pool.generate(request())
        await fleet.pause_and_load(1)
        assert (await fleet.updater.update(1)).serving == ("engine-0", "engine-1")


async def test_an_engine_that_cannot_tell_is_trusted_and_that_is_stated_once(caplog: pytest.LogCaptureFixture):
    async with Fleet(2) as fleet:
        fleet.engines[0].mute = True
        for version in (1, 2):
            updated = await fleet.update(version)
            assert updated.unverified == ("engine-0",)
    assert sum("engine-0 cannot show which weights" in record.getMessage() for record in caplog.records) == 1


async def test_an_engine_that_was_started_again_or_joins_has_to_show_its_weights():
    async with Fleet(2) as fleet:
        await fleet.update(1)
        engine = fleet.engines[0]
        engine.down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "down")
        await fleet.pool.check_health()
        engine.weights = 0
        engine.down_error = None
        await fleet.until(lambda: "other weights" in fleet.state("engine-0").quarantine_reason)
        assert fleet.pool.healthy == ["engine-1"]
        engine.weights = 1
        await fleet.serving(2)
        late = Weighted("late")
        fleet.pool.add_engine(late)
        assert fleet.pool.healthy == ["engine-0", "engine-1"]
        late.weights = 1
        await fleet.serving(3)


async def test_an_engine_that_joins_during_an_update_has_to_show_its_weights():
    async with Fleet(2) as fleet:
        await fleet.pause_and_load(1)
        fleet.engines[0].held_for = 3
        updating = asyncio.create_task(fleet.updater.update(1))
        await settle()
        fleet.pool.add_engine(Weighted("late"))
        await updating
        await fleet.updater.resume()
        await fleet.until(lambda: "away from the other engines" in fleet.state("late").quarantine_reason)
        assert fleet.pool.healthy == ["engine-0", "engine-1"]


async def test_a_cancelled_update_lets_no_unchecked_engine_serve_and_none_that_joins():
    async with Fleet(2) as fleet:
        await fleet.updater.pause()
        fleet.engines[0].held_for = 3
        fleet.load(1, only=(0,))
        updating = asyncio.create_task(fleet.updater.update(1))
        await settle()
        updating.cancel()
        await asyncio.wait({updating})
        fleet.pool.add_engine(Weighted("late"))
        await asyncio.sleep(0.02)
        assert fleet.pool.healthy == []
        fleet.load(1)
        updated = await fleet.updater.update(1)
        assert (updated.serving, list(updated.quarantined)) == (("engine-0", "engine-1"), ["late"])


async def test_an_engine_that_joins_after_a_failed_update_must_show_its_weights():
    async with Fleet(2) as fleet:
        await fleet.updater.pause()
        right = Weighted("right")
        right.weights = 1
        reference = await right.probe_logprobs(fleet.updater.probe_token_ids)
        with pytest.raises(WeightUpdateError, match="no engine has version 1"):
            await fleet.updater.update(1, reference_logprobs=reference)
        fleet.pool.add_engine(Weighted("late"))
        assert fleet.pool.healthy == []
        await fleet.until(lambda: "away from the trainer" in fleet.state("late").quarantine_reason)
        fleet.pool.add_engine(right)
        await fleet.until(lambda: fleet.pool.healthy == ["right"])


async def test_joiners_with_old_weights_do_not_outvote_those_that_have_the_new_ones():
    async with Fleet(1) as fleet:
        await fleet.pause_and_load(1)
        for name in ("engine-a", "engine-b"):
            fleet.pool.add_engine(Weighted(name))
        updated = await fleet.updater.update(1)
        assert updated.serving == ("engine-0",)
        assert all("stale" in reason for reason in updated.quarantined.values())


@pytest.mark.parametrize("version", [0, 5])
async def test_the_first_version_needs_no_pause(version: int):
    async with Fleet(3) as fleet:
        fleet.load(1, only=(0, 1))
        updated = await fleet.updater.update(version)
        assert updated.serving == ("engine-0", "engine-1")
        assert "away from the other engines" in updated.quarantined["engine-2"]
        assert fleet.pool.version == version
        fleet.load(2)
        assert (await fleet.updater.update(version + 1)).serving == ("engine-0", "engine-1", "engine-2")


async def test_after_a_restart_the_next_version_needs_something_to_compare_with():
    async with Fleet(2) as fleet:
        fleet.pool.set_version(3)  # as the ledger has it
        fleet.load(1)
        with pytest.raises(WeightUpdateError, match="serves version 3 since the service was started"):
            await fleet.updater.update(4)
        reference = await fleet.engines[0].probe_logprobs(fleet.updater.probe_token_ids)
        assert (await fleet.updater.update(4, reference_logprobs=reference)).serving == ("engine-0", "engine-1")


async def test_after_a_restart_the_version_may_be_reported_again():
    async with Fleet(2) as fleet:
        fleet.pool.set_version(3)
        assert (await fleet.updater.update(3)).serving == ("engine-0", "engine-1")
        fleet.load(1)
        assert (await fleet.updater.update(4)).serving == ("engine-0", "engine-1")


async def test_versions_grow():
    async with Fleet(1) as fleet:
        await fleet.update(3)
        for version in (3, 1):
            with pytest.raises(WeightUpdateError, match=f"version {version} does not follow 3") as caught:
                await fleet.updater.update(version)
            assert caught.value.fix.endswith("the next one is 4.")
        with pytest.raises(WeightUpdateError, match="the reference has 1 log-probs, not 47"):
            await fleet.updater.update(4, reference_logprobs=[0.0])


@virtually
async def test_a_pause_expires_and_calls_go_on():
    async with Fleet(2) as fleet:
        await fleet.updater.pause("abort", expire_seconds=60)
        call = asyncio.create_task(fleet.pool.generate(request()))
        await asyncio.sleep(59)
        assert not call.done()
        await fleet.updater.pause("abort", expire_seconds=60)
        await asyncio.sleep(59)
        assert not call.done(), "a second pause starts the clock anew"
        assert set((await call).versions) == {0}
        assert not fleet.updater.paused
        await fleet.serving(2)
        assert [engine.cache_resets for engine in fleet.engines] == [0, 0], "what they have cached is valid"


@virtually
async def test_the_clock_of_a_pause_stands_still_in_an_update_and_starts_anew():
    async with Fleet(2, options=WeightUpdateOptions(first_retry_seconds=40, max_retry_seconds=40)) as fleet:
        await fleet.updater.pause("abort", expire_seconds=60)
        fleet.load(1)
        fleet.engines[0].held_for = 4
        updating = asyncio.create_task(fleet.updater.update(1))
        await asyncio.sleep(150)
        assert fleet.updater.pause_in_force is not None and fleet.updater.pause_in_force.expires_at is None
        assert (await updating).serving == ("engine-0", "engine-1")
        await asyncio.sleep(59)
        assert fleet.updater.paused
        await asyncio.sleep(2)
        assert not fleet.updater.paused
        assert fleet.pool.healthy == ["engine-0", "engine-1"], "the update has checked them"


@pytest.mark.parametrize("end", ["resume", "expire"])
async def test_after_a_pause_without_an_update_an_engine_shows_its_weights(end: str):
    """A trainer that died while it loaded: one engine has the new weights, under the old version."""
    async with Fleet(3) as fleet:
        await fleet.updater.pause(expire_seconds=0.01 if end == "expire" else None)
        fleet.load(1, only=(1,))
        if end == "resume":
            await fleet.updater.resume()
        await fleet.until(lambda: "other weights" in fleet.state("engine-1").quarantine_reason)
        await fleet.serving(2)
        results = await asyncio.gather(*(fleet.pool.generate(request(session_id=f"s{n}")) for n in range(6)))
        assert {result.engine for result in results} == {"engine-0", "engine-2"}
        fleet.load(0)
        await fleet.serving(3)


async def test_an_update_may_require_the_pause_in_which_its_weights_were_loaded():
    async with Fleet(2) as fleet:
        await fleet.update(1)
        fleet.load(2)
        with pytest.raises(WeightUpdateError, match="its pause is over") as caught:
            await fleet.updater.update(2, require_pause=True)
        assert "expire_seconds" in caught.value.fix
        assert fleet.pool.version == 1
        await fleet.until(lambda: all("other weights" in fleet.state(f"engine-{n}").quarantine_reason for n in (0, 1)))
        await fleet.updater.pause()
        assert (await fleet.updater.update(2, require_pause=True)).serving == ("engine-0", "engine-1")


async def test_one_at_a_time():
    async with Fleet(1) as fleet:
        fleet.engines[0].deaf = True
        call = await begun(fleet, 10**6, 3)
        pausing = asyncio.create_task(fleet.updater.pause())
        await settle(3)
        with pytest.raises(WeightUpdateError, match="another pause or update is under way"):
            await fleet.updater.update(1)
        pausing.cancel()
        call.cancel()


async def test_an_update_that_moved_nothing_is_said(caplog: pytest.LogCaptureFixture):
    async with Fleet(2) as fleet:
        await fleet.updater.pause()
        await fleet.updater.update(1)
    assert any("moved no engine's log-probs" in record.getMessage() for record in caplog.records)


steps = st.lists(
    st.tuples(
        st.sampled_from(["abort", "drain", "keep", "update without a pause", "nothing"]),
        st.integers(0, 12),  # turns of the event loop before it
        st.integers(0, 7),  # which engines are loaded, a bit each
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, tells_versions=st.booleans(), rollouts=st.integers(1, 6))
def test_no_token_has_another_version_than_the_weights_that_sampled_it(steps, tells_versions, rollouts):
    async def roll(fleet: Fleet, session: str, results: list[GenerationResult]) -> None:
        for turn in range(4):
            ids = [turn + 1]
            while True:
                result = await fleet.pool.generate(request(session_id=session, prompt_ids=tuple(ids), max_tokens=8))
                results.append(result)
                ids += result.token_ids
                if result.finish_reason != "abort":
                    break
        fleet.pool.forget_session(session)

    async def scenario() -> list[GenerationResult]:
        results: list[GenerationResult] = []
        async with Fleet(
            3, reports_versions=tells_versions, options=WeightUpdateOptions(first_retry_seconds=0.0)
        ) as fleet:
            version, known = 0, False
            async with asyncio.TaskGroup() as tasks:
                for n in range(rollouts):
                    tasks.create_task(roll(fleet, f"s{n}", results))
                for mode, turns, which in steps:
                    await settle(turns)
                    try:
                        if mode in ("abort", "drain", "keep"):
                            known = True
                            await fleet.updater.pause(mode)
                        elif not known or mode == "nothing" or any(engine.busy for engine in fleet.engines):
                            continue  # whose weights change without a word is lost to any library
                        version += 1
                        fleet.load(version, only=[n for n in range(3) if which >> n & 1 or n == version % 3])
                        await fleet.updater.update(version)
                    except WeightUpdateError:
                        pass
                    await fleet.updater.resume()
                fleet.load(version)
        return results

    results = asyncio.run(scenario())
    assert len(results) >= 4 * rollouts
    assert all(honest(result) for result in results)
