"""Rules of the account: what a request is charged, when there is credit, what is given back."""

import pytest

from encodepool_worker.frontend.admission import MAX_MESSAGE_BYTES, MIB, Account, Limits, NoCredit

LIMITS = Limits(pixel_bytes=100 * MIB, message_bytes=25 * MIB, queue_tokens=1000, queue_s=60.0)


@pytest.fixture
def account():
    account = Account(LIMITS)
    yield account
    assert account.reading_bytes == sum(account._reading.values())
    assert account.queued_bytes == sum(share.nbytes for share in account._queued.values())
    assert account.held_bytes <= LIMITS.pixel_bytes


def submit(account, seq, nbytes, cost=1, **facts):
    hold = account.start_reading()
    account.measured(hold, nbytes)
    try:
        account.check(hold, cost, **({"now_s": 0.0, "deadline_s": None, "tokens_per_s": None} | facts))
    except NoCredit:
        account.drop(hold)
        raise
    account.hand_over(hold, seq, cost)


def test_an_item_is_done_with_its_batch_and_after_the_one_that_runs():
    """A queue filled up to the last deadline would be encoded for nothing, each item a batch too late."""
    limits = Limits(100 * MIB, 25 * MIB, queue_tokens=1000, queue_s=60.0, batch_tokens=100)
    account = Account(limits)
    pace = {"now_s": 0.0, "tokens_per_s": 100.0, "busy_s": 0.5}
    submit(account, 1, MIB, cost=90, deadline_s=1.5, **pace)
    with pytest.raises(NoCredit, match=r"done in 2\.5 s, after the call's deadline in 2\.4 s"):
        submit(account, 2, MIB, cost=20, deadline_s=2.4, **pace)
    submit(account, 2, MIB, cost=20, deadline_s=2.6, **pace)
    with pytest.raises(NoCredit, match=r"done in 2\.5 s"):
        submit(account, 3, MIB, cost=1, deadline_s=2.4, **pace)


def test_a_reader_is_charged_the_longest_message_until_its_size_is_known(account):
    holds = [account.start_reading() for _ in range(4)]
    assert account.held_bytes == 100 * MIB
    assert not account.may_read()

    account.measured(holds[0], 10 * MIB)
    assert account.held_bytes == 85 * MIB
    assert not account.may_read()

    account.measured(holds[1], 10 * MIB)
    assert account.may_read()


def test_a_full_queue_leaves_room_to_read_two_more(account):
    for seq in range(2):
        submit(account, seq, 25 * MIB)
    assert account.queued_bytes == LIMITS.queued_bytes

    assert account.may_read(2)
    assert not account.may_read(3)
    with pytest.raises(NoCredit, match=r"no room for 65536 more; add replicas or raise max_pixel_mib"):
        submit(account, 2, 1)
    assert account.queued_items == 2


def test_a_credit_makes_room_again(account):
    for seq in range(2):
        submit(account, seq, 25 * MIB)
    account.credit(1)
    submit(account, 2, 25 * MIB)
    assert account.queued_bytes == 50 * MIB


def test_a_small_request_costs_at_least_64_kib(account):
    submit(account, 1, 10)
    assert account.queued_bytes == 64 * 1024


def test_tokens_are_bounded_but_an_item_above_the_limit_is_taken_by_an_empty_queue(account):
    submit(account, 1, MIB, cost=5000)
    with pytest.raises(NoCredit, match="5000 of 1000 tokens"):
        submit(account, 2, MIB, cost=1)
    account.credit(1)
    submit(account, 3, MIB, cost=400)
    submit(account, 4, MIB, cost=600)
    with pytest.raises(NoCredit, match="raise max_queue_tokens"):
        submit(account, 5, MIB, cost=1)


@pytest.mark.parametrize(
    ("tokens_per_s", "deadline_s", "refused"),
    [
        (None, 100.5, ""),  # nothing measured, nothing predicted
        (10.0, None, ""),  # 50 s
        (8.0, None, "predicted wait is 62.5 s, above max_queue_seconds 60"),
        (10.0, 161.0, ""),  # done in 60 s
        (10.0, 159.0, r"done in 60.0 s, after the call's deadline in 59.0 s"),
    ],
)
def test_the_predicted_wait_may_not_exceed_the_limit_nor_the_deadline(
    account, tokens_per_s, deadline_s, refused
):
    submit(account, 1, MIB, cost=500)
    facts = {"now_s": 100.0, "deadline_s": deadline_s, "tokens_per_s": tokens_per_s}
    if refused:
        with pytest.raises(NoCredit, match=refused):
            submit(account, 2, MIB, cost=100, **facts)
    else:
        submit(account, 2, MIB, cost=100, **facts)


def test_an_idle_worker_takes_an_item_however_long_it_takes(account):
    submit(account, 1, MIB, cost=900, now_s=0.0, deadline_s=None, tokens_per_s=1.0)


def test_what_is_not_held_cannot_be_given_back(account):
    hold = account.start_reading()
    account.drop(hold)
    with pytest.raises(KeyError):
        account.drop(hold)
    submit(account, 1, MIB)
    account.credit(1)
    with pytest.raises(KeyError):
        account.credit(1)


def test_a_request_cannot_turn_out_larger_than_it_was_charged(account):
    hold = account.start_reading()
    with pytest.raises(ValueError, match="grows"):
        account.measured(hold, 25 * MIB + 1)
    account.drop(hold)


@pytest.mark.parametrize(("pixel_mib", "message_mib"), [(1024, 256), (768, 256), (96, 32), (3, 1)], ids=str)
def test_the_longest_message_is_256_mib_or_a_third_of_a_small_budget(pixel_mib, message_mib):
    limits = Limits.within(pixel_mib * MIB, 1, 1.0)
    assert limits.message_bytes == message_mib * MIB <= MAX_MESSAGE_BYTES
    assert limits.queued_bytes + 2 * limits.message_bytes == limits.pixel_bytes


def test_limits_that_leave_no_room_to_read_are_refused():
    with pytest.raises(ValueError, match="message_bytes"):
        Limits(pixel_bytes=10, message_bytes=4, queue_tokens=1, queue_s=1.0)
