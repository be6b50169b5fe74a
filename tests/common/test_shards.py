"""Several schedulers share one stream of tasks and one space of ids: each position and each id
belongs to exactly one of them."""

from hypothesis import given
from hypothesis import strategies as st

from coppice.common.shards import Shard

COUNTS, DRAWS = st.integers(1, 7), st.integers(0, 300)


@given(COUNTS, DRAWS)
def test_all_shards_together_draw_what_one_scheduler_would(count: int, draws: int) -> None:
    shards = [Shard(number, count) for number in range(count)]
    drawn = [shard.position(draw) for shard in shards for draw in range(draws)]
    assert sorted(drawn) == list(range(count * draws))


@given(COUNTS, st.data())
def test_a_resumed_shard_goes_on_behind_its_last_draw(count: int, data: st.DataObject) -> None:
    shard, draws = Shard(data.draw(st.integers(0, count - 1)), count), data.draw(DRAWS)
    last = max((shard.position(draw) for draw in range(draws)), default=-1)
    assert shard.draws(last + 1) == draws


@given(COUNTS, st.integers(1, 50))
def test_ids_of_different_shards_never_meet_and_each_knows_its_own(count: int, many: int) -> None:
    shards = [Shard(number, count) for number in range(count)]
    ids = {shard: [-1] for shard in shards}
    for shard, own in ids.items():
        for _ in range(many):
            own.append(shard.after(own[-1]))
        del own[0]
    assert sorted(i for own in ids.values() for i in own) == list(range(count * many))
    trained = dict.fromkeys(range(count * many), 1)
    assert all(list(shard.own(trained)) == own for shard, own in ids.items())
