"""How kopf is told to watch."""

import itertools
import random

from encodepool_operator.controller import observe
from encodepool_operator.controller.watch import LONGEST_WAIT_S, Backoffs, settings_of


def test_tries_never_end_and_waits_stay_short():
    waits = list(itertools.islice(Backoffs(random.Random(1)), 40))
    assert 0.5 <= waits[0] <= 1
    assert all(LONGEST_WAIT_S / 2 <= wait_s <= LONGEST_WAIT_S for wait_s in waits[8:])
    assert len(set(waits[8:])) > 20
    # A list with an end would make kopf give up.
    assert not hasattr(settings_of(observe.WATCHED).networking.error_backoffs, "__len__")
