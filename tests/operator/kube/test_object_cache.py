import pytest

from encodepool_operator.kube.cache import MAX_GRAVES, Cache
from encodepool_operator.kube.kinds import CONFIG_MAP, POD


@pytest.fixture
def heard():
    return []


@pytest.fixture
def cache(heard):
    def changed(kind, before, after):
        versions = tuple(obj and obj["metadata"]["resourceVersion"] for obj in (before, after))
        heard.append((kind.plural, *versions))

    return Cache({POD: lambda pod: {"metadata": pod["metadata"]}}, changed)


def test_the_newer_version_stands_whatever_the_order(cache, heard, make_object):
    # The answer to our own write comes first, then the watch tells of what was before it.
    assert cache.put(CONFIG_MAP, make_object("a", 12))
    assert not cache.put(CONFIG_MAP, make_object("a", 11))
    assert not cache.put(CONFIG_MAP, make_object("a", 12))
    assert cache.get(CONFIG_MAP, "ns", "a")["metadata"]["resourceVersion"] == "12"
    # 9 is older than 12 although it sorts after it as a text.
    assert not cache.put(CONFIG_MAP, make_object("a", 9))
    assert cache.put(CONFIG_MAP, make_object("a", 100))
    assert heard == [("configmaps", None, "12"), ("configmaps", "12", "100")]


def test_what_was_deleted_is_not_brought_back_by_a_late_answer(cache, heard, make_object):
    cache.put(POD, make_object("a", 5))
    assert cache.drop(POD, make_object("a", 8))
    assert not cache.put(POD, make_object("a", 7))
    assert cache.get(POD, "ns", "a") is None
    assert heard[-1] == ("pods", "5", None)


def test_another_object_of_the_same_name_is_another_object(cache, make_object):
    cache.put(POD, make_object("a", 5, uid="old"))
    cache.put(POD, make_object("a", 9, uid="new"))
    # The deletion of the old one is told late.
    assert not cache.drop(POD, make_object("a", 8, uid="old"))
    assert cache.get(POD, "ns", "a")["metadata"]["uid"] == "new"
    # And the old one stays buried.
    assert not cache.put(POD, make_object("a", 4, uid="old"))


def test_an_object_that_left_the_selector_may_come_back(cache, make_object):
    cache.put(POD, make_object("a", 5))
    cache.drop(POD, make_object("a", 6))  # its label was taken away: the watch says deleted
    assert cache.put(POD, make_object("a", 7))


def test_only_what_is_needed_of_an_object_is_kept(cache, make_object):
    cache.put(POD, {**make_object("a", 5), "spec": {"long": "text"}})
    assert "spec" not in cache.get(POD, "ns", "a")
    cache.put(CONFIG_MAP, {**make_object("a", 5), "data": {"k": "v"}})
    assert cache.get(CONFIG_MAP, "ns", "a")["data"] == {"k": "v"}
    assert [len(list(cache.all(kind))) for kind in (POD, CONFIG_MAP)] == [1, 1]


def test_the_memory_of_deleted_objects_is_bounded(cache, make_object):
    for number in range(MAX_GRAVES + 1):
        cache.drop(POD, make_object("a", 5, uid=f"u{number}"))
    assert cache.put(POD, make_object("a", 4, uid="u0"))
    assert not cache.put(POD, make_object("b", 4, uid="u1"))
