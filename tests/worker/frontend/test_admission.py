"""Rules of the account: what a request is charged, when there is credit, what is given back."""

import pytest

from encodepool_worker.frontend.admission import MAX_MESSAGE_BYTES, MIB, Account, Limits, NoCredit

LIMITS = Limits(pixel_bytes=100 * MIB, message_bytes=25 * MIB)


@pytest.fixture
def account():
    account = Account(LIMITS)
    yield account
    assert account.reading_bytes == sum(account._reading.values())
    assert account.queued_bytes == sum(share.nbytes for share in account._queued.values())
    assert account.held_bytes <= LIMITS.pixel_bytes


def submit(account, seq, nbytes):
    hold = account.start_reading()
    account.measured(hold, nbytes)
    try:
        account.check(hold)
    except NoCredit:
        account.drop(hold)
        raise
    account.hand_over(hold, seq, cost=1)


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
    limits = Limits.within(pixel_mib * MIB)
    assert limits.message_bytes == message_mib * MIB <= MAX_MESSAGE_BYTES
    assert limits.queued_bytes + 2 * limits.message_bytes == limits.pixel_bytes


def test_limits_that_leave_no_room_to_read_are_refused():
    with pytest.raises(ValueError, match="message_bytes"):
        Limits(pixel_bytes=10, message_bytes=4)
