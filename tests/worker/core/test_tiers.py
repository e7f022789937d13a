"""The second tier: what leaves the first moves there, and is sent from where it lies."""

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import kinds, make_item, make_layout, make_receiver, refusal
from encodepool_worker.types import Status

S = RoomState
FIRST, SECOND = 640, 640  # 40 tokens of 16 bytes each
AHEAD = FIRST // 8


@pytest.fixture
def driver(open_driver):
    return open_driver(store_bytes=FIRST, second_tier_bytes=SECOND)


def ship(driver, room, content, n_tokens=10):
    """A claimed room, from request to success."""
    driver.request(room, n_tokens=n_tokens, content=content, claimed=True)
    while driver.state(room) is S.QUEUED:
        driver.demoted()
    if driver.batch:
        driver.encoded()
    driver.land(room)


def copy_all(driver):
    """Every copy under way is done, and every copy that begins because of it."""
    while driver.demotes:
        driver.demoted()


def in_second(driver, content, n_tokens=10):
    """Rows that have moved to the second tier."""
    ship(driver, 900, content, n_tokens)
    for room in (901, 902, 903):
        ship(driver, room, f"filler {room}")
        copy_all(driver)
    sources = [piece.source for piece in hit(driver, 910, content, n_tokens).slices]
    assert all(FIRST <= source < FIRST + SECOND for source in sources)
    driver.land(910)


def hit(driver, room, content, n_tokens=10):
    """The write of a room whose rows are there."""
    out = driver.request(room, n_tokens=n_tokens, content=content, claimed=True)
    assert driver.batch is None, "not a hit"
    (write,) = (i for i in out if isinstance(i, do.Write))
    return write


def counters(driver):
    return driver.pipeline.snapshot().counters


def tiers(driver):
    return driver.pipeline.snapshot().store.tiers


def test_the_oldest_entry_moves_before_its_bytes_are_needed(driver):
    for n, name in enumerate("abc"):
        ship(driver, n, name)
    assert not driver.demotes  # 160 bytes are free
    out = driver.request(3, n_tokens=10, content="d", claimed=True)
    (demote,) = (i for i in out if isinstance(i, do.Demote))  # while the tower works on d
    assert [e.nbytes for e in demote.source] == [160]
    assert driver.batch_rooms == [3]
    driver.demoted()
    driver.encoded()
    driver.land(3)
    assert not driver.demotes
    first, second = tiers(driver)
    assert first.free_bytes == 160 >= AHEAD
    assert (first.bytes_by_state["cached"], second.bytes_by_state["cached"]) == (480, 160)
    assert (first.evictions, second.evictions) == (1, 0)


def test_a_hit_in_the_second_tier_is_sent_from_there(driver):
    in_second(driver, "a")
    seen = counters(driver)
    assert (seen["hits"], seen["hits_second_tier"], seen["misses"]) == (1, 1, 4)
    assert tiers(driver)[0].bytes_by_state["cached"] == 480  # nothing came back
    out = driver.request(920, content="a", n_tokens=10, claimed=True)
    assert kinds(out).count("Write") == 1
    (end,) = (i for i in driver.land(920) if isinstance(i, do.Conclude))
    assert (end.hit_tier, end.nbytes) == (1, 160)


def test_a_finished_room_ships_again_from_the_second_tier(driver):
    in_second(driver, "a")
    (write,) = driver.announce(900, make_receiver(layout=make_layout(10)))
    assert write.slices[0].source >= FIRST
    driver.land(900)
    assert driver.told(900) == [("p", Status.SUCCESS)] * 2


def test_bytes_being_copied_are_nobody_elses_until_the_answer(driver):
    """Witness sees to it that no byte of the source changes; the tower waits for the copy alone."""
    for n, name in enumerate("abcd"):
        ship(driver, n, name)
    assert len(driver.demotes) == 1
    driver.request(10, n_tokens=20, content="large", claimed=True)
    assert driver.batch is None
    assert len(driver.demotes) == 2
    driver.demoted()
    assert driver.batch is None
    driver.demoted()
    assert driver.batch_rooms == [10]
    assert tiers(driver)[0].evictions == 2


def test_rows_wanted_again_while_they_are_copied_stay(driver):
    for n, name in enumerate("abcd"):
        ship(driver, n, name)
    (entry,) = driver.demotes
    assert hit(driver, 10, "a").slices[0].source < FIRST  # no need to wait for the copy
    assert len(driver.demotes) == 2  # another goes in its stead
    driver.demoted(entry)
    first, second = tiers(driver)
    assert (first.bytes_by_state["held"], second.free_bytes) == (160, SECOND - 160)
    assert counters(driver)["demotions_in_vain"] == 1
    driver.land(10)
    copy_all(driver)
    assert hit(driver, 11, "a").slices[0].source < FIRST
    driver.land(11)


def test_rows_let_go_again_before_the_copy_is_done_move_all_the_same(driver):
    for n, name in enumerate("abcd"):
        ship(driver, n, name)
    hit(driver, 10, "a")
    driver.land(10)
    for entry in list(driver.demotes):
        driver.demoted(entry)
    assert hit(driver, 11, "a").slices[0].source >= FIRST
    driver.land(11)


def test_a_late_write_keeps_rows_in_their_tier(open_driver):
    driver = open_driver(FIRST, second_tier_bytes=SECOND, max_quarantined_bytes=FIRST + SECOND)
    in_second(driver, "old")
    ship(driver, 1, "a")
    hit(driver, 2, "a")
    hit(driver, 3, "old")
    driver.miss(2, late=True)
    driver.miss(3, late=True)
    for n in range(10, 18):  # everything else leaves, and moves on
        ship(driver, n, f"filler {n}")
        copy_all(driver)
    assert tiers(driver)[1].evictions > 3
    assert hit(driver, 20, "a").slices[0].source < FIRST
    assert hit(driver, 21, "old").slices[0].source >= FIRST
    driver.land(20)
    driver.land(21)
    assert driver.pipeline.snapshot().store.pinned_bytes == 320


def test_a_late_write_that_began_under_the_copy_keeps_the_rows_where_they_are(driver):
    for n, name in enumerate("abcd"):
        ship(driver, n, name)
    (entry,) = driver.demotes
    hit(driver, 10, "a")
    driver.miss(10, late=True)
    driver.abort(10)
    driver.demoted(entry)
    assert hit(driver, 11, "a").slices[0].source < FIRST
    driver.land(11)


def test_the_second_tier_drops_its_least_recently_used(open_driver):
    driver = open_driver(store_bytes=FIRST, second_tier_bytes=320)
    for n in range(7):
        ship(driver, n, f"content {n}")
        copy_all(driver)
        if n == 5:
            hit(driver, 50, "content 1")  # makes it younger than content 2
            driver.land(50)
    first, second = tiers(driver)
    assert (first.evictions, second.evictions) == (4, 2)
    for n in (1, 3, 4, 5, 6):
        hit(driver, 100 + n, f"content {n}")
        driver.land(100 + n)
    for n in (0, 2):
        ship(driver, 100 + n, f"content {n}")
    assert counters(driver)["misses"] == 9


def test_what_the_second_tier_cannot_hold_is_dropped_at_once(open_driver):
    driver = open_driver(store_bytes=FIRST, second_tier_bytes=160)
    ship(driver, 1, "large", n_tokens=20)
    ship(driver, 2, "small", n_tokens=10)
    driver.request(3, n_tokens=20, content="next", claimed=True)
    assert driver.batch_rooms == [3]
    assert not driver.demotes
    assert [tier.evictions for tier in tiers(driver)] == [1, 0]


def test_rows_whose_copy_failed_are_made_again(driver):
    for n, name in enumerate("abcd"):
        ship(driver, n, name)
    driver.demoted(failed=True)
    assert tiers(driver)[1].free_bytes == SECOND
    driver.request(10, n_tokens=10, content="a", claimed=True)
    assert driver.batch_rooms == [10]
    driver.encoded()


def test_a_copy_that_failed_takes_nothing_from_who_reads_the_rows(driver):
    for n, name in enumerate("abcd"):
        ship(driver, n, name)
    (entry,) = driver.demotes
    hit(driver, 10, "a")
    driver.demoted(entry, failed=True)
    assert hit(driver, 11, "a").slices[0].source < FIRST
    driver.land(10)
    driver.land(11)


def test_rows_in_the_second_tier_are_in_nobodys_way(driver):
    """Unclaimed rooms may hold as many of them as there are, also while a large claimed item waits."""
    for n in range(7):
        ship(driver, n, f"content {n}")
        copy_all(driver)
    blocker = hit(driver, 50, "content 6")
    driver.request(51, n_tokens=35, claimed=True)  # more than half, and no space for it
    assert driver.batch is None
    for n in range(4):
        driver.request(60 + n, n_tokens=10, content=f"content {n}")
    assert [driver.state(60 + n) for n in range(4)] == [S.PARKED] * 4
    assert driver.pipeline.snapshot().store.unclaimed_bytes == 0
    assert tiers(driver)[1].bytes_by_state["held"] == 640
    driver.land(blocker.room)
    assert driver.batch_rooms == [51]  # what left for it had to be dropped: the second tier is full


def test_unclaimed_rooms_hold_half_of_the_first_tier_at_most(open_driver):
    driver = open_driver(store_bytes=FIRST, second_tier_bytes=10 * FIRST)
    for room in range(1, 6):
        driver.request(room, n_tokens=10)
    while driver.batch:
        driver.encoded()
    assert driver.pipeline.snapshot().store.unclaimed_bytes == FIRST // 2
    assert refusal(driver.request(9, n_tokens=41)) == (
        "items",
        "rows take 656 bytes, the store holds 640: make it larger",
    )


def test_a_store_of_one_entry_serves_room_after_room(open_driver):
    """Every batch needs the whole of it, so each waits for the copy of the one before."""
    driver = open_driver(store_bytes=64, second_tier_bytes=128)
    for n in range(5):
        driver.request(n, content=f"content {n}", claimed=True)
    for n in range(5):
        if driver.demotes:
            assert driver.batch is None
            driver.demoted()
        assert driver.batch_rooms == [n]
        driver.encoded()
        driver.land(n)
    assert counters(driver)["misses"] == 5
    driver.demoted()
    for room, n in ((10, 4), (11, 3)):
        assert hit(driver, room, f"content {n}", n_tokens=4).slices[0].source >= 64
        driver.land(room)


def test_copies_under_way_are_bounded_and_none_is_forgotten(open_driver):
    driver = open_driver(FIRST, second_tier_bytes=SECOND, max_demotions=2)
    for n in range(20):
        ship(driver, n, f"content {n}", n_tokens=2)
        if n < 18:
            copy_all(driver)
    driver.request(50, n_tokens=40, claimed=True)
    n_copies = 0
    while driver.batch is None:
        assert len(driver.demotes) in (1, 2)
        driver.demoted()
        n_copies += 1
    assert n_copies > 10


@pytest.mark.parametrize("where", ["first", "second"])
@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (make_layout(11), "n_tokens=10"),
        (make_layout(10, hidden=8), "hidden=4"),
        (make_layout(10, levels=1), "levels=0"),
        (make_layout(10, dtype="float16"), "float32"),
    ],
)
def test_a_hit_is_one_only_if_tokens_width_and_dtype_are_those_asked_for(driver, where, layout, says):
    """The key says what the rows are made from; should it ever lie, nobody gets rows of another shape."""
    if where == "second":
        in_second(driver, "a")
    else:
        ship(driver, 900, "a")
    driver.announce(1, make_receiver(layout=layout))
    field, reason = refusal(driver.submit(make_item(1, "a", layout=layout)))
    assert field == "items"
    assert says in reason
    assert driver.told(1) == [("p", Status.FAILED)]
    hit(driver, 2, "a")
    driver.land(2)


def test_another_grid_or_revision_of_the_same_bytes_is_another_content(driver):
    """Both are in the key that the frontend makes, so the rows are made for each, and kept for each."""
    in_second(driver, "cat, grid 1x4x10")
    for room, content in ((1, "cat, grid 1x10x4"), (2, "cat, grid 1x4x10, revision 2")):
        ship(driver, room, content)
    assert counters(driver)["misses"] == 6
    for room, content in ((3, "cat, grid 1x4x10"), (4, "cat, grid 1x10x4")):
        hit(driver, room, content)
        driver.land(room)
